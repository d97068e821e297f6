"""`m3pc config`: print the settings of a run, compare presets, explain every setting."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.options import ConfigFile, Preset, Sets

if TYPE_CHECKING:
    from rich.console import Console

    from m3pc.config.overrides import FieldInfo

app = typer.Typer(no_args_is_help=True, help="Show, compare and explain the settings of a run.")

WIDE = 180  # columns of a table in a file or pipe


@app.command()
def show(preset: Preset = None, file: ConfigFile = None, sets: Sets = None) -> None:
    """Print every setting as YAML, which --file reads again."""
    from m3pc.config.presets import dump, resolve

    typer.echo(dump(resolve(preset=preset, file=file, sets=sets or [])), nl=False)


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="PRESET", help="parity, paper or small.")],
    right: Annotated[str, typer.Argument(metavar="PRESET", help="parity, paper or small.")],
) -> None:
    """Print the settings in which two presets differ."""
    from rich.table import Table

    from m3pc.config.overrides import flatten
    from m3pc.config.presets import resolve

    left_values, right_values = (flatten(resolve(preset=name)) for name in (left, right))
    table = Table("field", left, right)
    for path, value in left_values.items():
        if value != right_values[path]:
            table.add_row(path, _text(value), _text(right_values[path]))
    wide_console().print(table)


@app.command()
def fields() -> None:
    """List every setting: allowed values, value in each preset, meaning."""
    from itertools import groupby

    from m3pc.config.overrides import settings

    console = wide_console()
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
        by_preset = [_text(values[preset][setting.path]) for preset in PRESETS]
        table.add_row(setting.path, setting.allowed, *by_preset, setting.meaning)
    return table


def wide_console() -> "Console":
    """A console whose tables are wide in files and pipes; a terminal keeps its width."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
