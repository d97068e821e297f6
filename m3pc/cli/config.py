"""`m3pc config`: print a resolved configuration, compare presets, list every field."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from m3pc.config.overrides import FieldInfo

app = typer.Typer(no_args_is_help=True, help="Settings of a run: show, compare, explain.")

WIDE = 180  # columns of a table that goes to a file or a pipe


@app.command()
def show(
    preset: Annotated[
        str | None, typer.Option(help="parity, paper or small; paper if neither this nor a file.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="YAML with the fields that differ; may name its preset.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set one field. May be repeated."),
    ] = None,
) -> None:
    """Print every field, as YAML that can be read again."""
    from m3pc.config.presets import dump, resolve

    typer.echo(dump(resolve(preset=preset, file=file, sets=sets or [])), nl=False)


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="PRESET")],
    right: Annotated[str, typer.Argument(metavar="PRESET")],
) -> None:
    """Print the fields in which two presets differ."""
    from rich.table import Table

    from m3pc.config.overrides import flatten
    from m3pc.config.presets import resolve

    ours, theirs = flatten(resolve(preset=left)), flatten(resolve(preset=right))
    table = Table("field", left, right)
    for path in ours:
        if ours[path] != theirs[path]:
            table.add_row(path, _text(ours[path]), _text(theirs[path]))
    _console().print(table)


@app.command()
def fields() -> None:
    """List every field: what it may be, what it is in each preset, what it means."""
    from itertools import groupby

    from m3pc.config.overrides import settings

    console = _console()
    for section, members in groupby(settings().values(), lambda s: s.path.rpartition(".")[0]):
        console.print(_section(section, members))


def _section(name: str, members: Iterable["FieldInfo"]) -> object:
    from rich.table import Table

    from m3pc.config.overrides import flatten
    from m3pc.config.presets import PRESETS

    values = {preset: flatten(config) for preset, config in PRESETS.items()}
    table = Table("field", "allowed", *PRESETS, "meaning", title=name, title_justify="left")
    table.columns[0].no_wrap = True
    for setting in members:
        shown = [_text(values[preset][setting.path]) for preset in PRESETS]
        table.add_row(setting.path, setting.allowed, *shown, setting.meaning)
    return table


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
