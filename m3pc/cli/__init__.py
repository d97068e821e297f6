"""The `m3pc` command.

Commands import heavy packages inside their functions, so that help is quick.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from m3pc import __version__
from m3pc.cli import (
    authors,
    config,
    data,
    doctor,
    evaluate,
    explored,
    finetune,
    fleet,
    goal,
    monitor,
    node,
    pretrain,
    replay,
    serve,
    submit,
)
from m3pc.core.exit_codes import (
    BAD_INPUT,
    DIVERGED,
    INTERNAL,
    INTERRUPTED,
    IO_FAILED,
    OUT_OF_MEMORY,
)

# Set before numpy loads: for one state times one layer, a second thread costs more than it gains.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Panels of `m3pc --help`, in their order.
PANELS: Mapping[str, Mapping[str, Callable[..., None] | typer.Typer]] = {
    "Data": {"data": data.app, "replay": replay.app},
    "Train": {
        "pretrain": pretrain.pretrain,
        "finetune": finetune.finetune,
        "resume": finetune.resume,
    },
    "Evaluate": {
        "evaluate": evaluate.evaluate,
        "goal": goal.goal,
        "goal-compare": goal.compare,
        "explored": explored.explored,
    },
    "Run a cluster": {
        "node": node.app,
        "submit": submit.submit,
        "jobs": submit.app,
        "scale": fleet.scale,
        "stop": fleet.stop,
    },
    "Watch": {"status": fleet.status, "monitor": monitor.app},
    "Serve": {"serve": serve.serve},
    "Tools": {
        "config": config.app,
        "doctor": doctor.doctor,
        "import-authors": authors.import_authors,
        "verify": authors.verify,
    },
}


class _InPanelOrder(TyperGroup):
    """Lists commands and groups of commands in the order of PANELS."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for commands in PANELS.values() for name in commands]


app = typer.Typer(
    name="m3pc",
    cls=_InPanelOrder,
    help="Offline-to-online reinforcement learning: one trajectory model that plans with itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def _show_version(shown: bool) -> None:
    if shown:
        typer.echo(f"m3pc {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None: ...


def main() -> None:
    """Run a command. Errors that the user can fix are one sentence, without a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        _end(IO_FAILED, f"{error}; check the disk, the path and its permissions")
    except MemoryError:
        _end(OUT_OF_MEMORY, "out of memory; use a machine with more memory, or less data at a time")
    except Exception as error:
        from m3pc.types import DivergedError, InputError  # not at the top: it loads numpy

        if isinstance(error, InputError):
            _end(BAD_INPUT, str(error))
        if isinstance(error, DivergedError):
            _end(DIVERGED, str(error))
        traceback.print_exc()
        sys.exit(INTERNAL)


def _end(code: int, sentence: str) -> NoReturn:
    typer.secho(f"error: {sentence}", fg="red", err=True)
    sys.exit(code)
