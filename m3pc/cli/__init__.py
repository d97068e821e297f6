"""The `m3pc` command. Heavy packages load inside the commands that need them, so help is quick."""

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

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

# Before numpy loads: products of one state with one layer wait longer for a second thread than they
# compute. Whoever wants another number sets it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

app = typer.Typer(
    name="m3pc",
    help="Offline-to-online reinforcement learning: one trajectory model that plans with itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(data.app, name="data")
app.add_typer(replay.app, name="replay")
app.add_typer(config.app, name="config")
app.add_typer(node.app, name="node")
app.command("doctor")(doctor.doctor)
app.command("pretrain")(pretrain.pretrain)
app.command("evaluate")(evaluate.evaluate)
app.command("goal")(goal.goal)
app.command("goal-compare")(goal.compare)
app.command("finetune")(finetune.finetune)
app.command("resume")(finetune.resume)
app.command("status")(fleet.status)
app.command("scale")(fleet.scale)
app.command("stop")(fleet.stop)
app.command("serve")(serve.serve)
app.command("submit")(submit.submit)
app.add_typer(submit.app, name="jobs")
app.add_typer(monitor.app, name="monitor")
app.command("explored")(explored.explored)
app.command("import-authors")(authors.import_authors)
app.command("verify")(authors.verify)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"m3pc {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run a command. What the user can mend is one sentence and exit code 2, never a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        _end(IO_FAILED, f"{error}; look at the disk, the path and its rights")
    except MemoryError:
        _end(OUT_OF_MEMORY, "out of memory; use a machine with more, or less data at a time")
    except Exception as error:
        from m3pc.types import DivergedError, InputError  # here, because it loads numpy

        if isinstance(error, InputError):
            _end(BAD_INPUT, str(error))
        if isinstance(error, DivergedError):
            _end(DIVERGED, str(error))
        traceback.print_exc()
        sys.exit(INTERNAL)


def _end(code: int, sentence: str) -> NoReturn:
    typer.secho(f"error: {sentence}", fg="red", err=True)
    sys.exit(code)
