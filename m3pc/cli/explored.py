"""`m3pc explored`: what online runs collected, beside what they started from."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.picture import picture

if TYPE_CHECKING:
    from m3pc.online.exploration import Exploration


def explored(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of online runs.")],
    png: Annotated[
        Path | None, typer.Option(callback=picture, help="Draw it, a panel a run.")
    ] = None,
) -> None:
    """Returns of collected episodes over the run, against the level before it. Reads files only."""
    from m3pc.online.exploration import draw
    from m3pc.online.exploration import explored as find
    from m3pc.online.run_folder import open_run
    from m3pc.types import InputError

    opened = [open_run(run) for run in runs]
    if len({run.facts.env for run in opened}) > 1:
        raise InputError("the runs are of several environments; compare runs of one")
    found = [find(run) for run in opened]
    if not all(len(one.ends) for one in found):
        raise InputError("a run has no whole episode yet; wait for one, or leave the run out")
    for one in found:
        _show(one)
    if png is not None:
        draw(found, png)
        typer.echo(f"picture: {png}")


def _show(found: "Exploration") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    level = "unknown" if found.offline is None else f"{found.offline:.1f}"
    table = Table(
        title=f"{found.name}: {found.how}, offline {found.unit} {level}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    names = ("steps", "episodes", f"mean {found.unit}", f"best {found.unit}", "above offline")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for part in found.parts():
        table.add_row(
            f"{part.begin:,} to {part.end:,}",
            f"{part.episodes:,}",
            _number(part.mean),
            _number(part.best),
            "-" if math.isnan(part.above) else f"{100 * part.above:.0f} %",
        )
    Console(highlight=False).print(table)
    typer.echo(f"aborted episodes, left out: {found.aborted:,}")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
