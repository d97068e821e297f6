"""`m3pc explored`: returns of the episodes that online runs collected."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.options import RunPaths, check_picture

if TYPE_CHECKING:
    from m3pc.online.exploration import Exploration


def explored(
    runs: RunPaths,
    png: Annotated[
        Path | None,
        typer.Option(callback=check_picture, help="File for a picture, a panel per run."),
    ] = None,
) -> None:
    """Compare the returns of collected episodes with the offline model's, over the run."""
    from m3pc.online.exploration import draw_exploration, read_exploration
    from m3pc.online.run_folder import open_run
    from m3pc.types import InputError

    opened = [open_run(run) for run in runs]
    if len({run.info.env for run in opened}) > 1:
        raise InputError("the runs are of several environments; compare runs of one")
    explorations = [read_exploration(run) for run in opened]
    if not all(len(exploration.ends) for exploration in explorations):
        raise InputError("a run has no complete episode yet; wait for one, or leave the run out")
    for exploration in explorations:
        _show(exploration)
    if png is not None:
        draw_exploration(explorations, png)
        typer.echo(f"picture: {png}")


def _show(exploration: "Exploration") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    unit = exploration.unit
    level = "unknown" if exploration.offline is None else f"{exploration.offline:.1f}"
    table = Table(
        title=f"{exploration.name}: {exploration.explorer}, offline {unit} {level}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for name in ("steps", "episodes", f"mean {unit}", f"best {unit}", "above offline"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in exploration.parts():
        table.add_row(
            f"{part.begin:,} to {part.end:,}",
            f"{part.episodes:,}",
            _number(part.mean),
            _number(part.best),
            "-" if math.isnan(part.above) else f"{100 * part.above:.0f} %",
        )
    Console(highlight=False).print(table)
    typer.echo(f"aborted episodes, left out: {exploration.aborted:,}")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
