"""`m3pc status`, `scale` and `stop`: watch and control an online run, from any shell."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from m3pc.cli.options import RunPath

POLL_SECONDS = 0.5
_NO_DRIVER = "{} runs in one process (--local), or its fleet is just starting"


def status(
    run: RunPath,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Print what an online run does now, or did last."""
    import json

    from rich.console import Console

    from m3pc.cli.live import page
    from m3pc.online.run_control import has_driver, read_status
    from m3pc.online.run_folder import open_run

    open_run(run)
    current = read_status(run)
    if json_:
        typer.echo(json.dumps(_without_nan(current)))
    elif current["driven"] and not has_driver(current):
        typer.echo(f"{_NO_DRIVER.format(run)}; its numbers are in {run / 'metrics.jsonl'}")
    elif "state" not in current:
        typer.echo(f"{run} has not run on a fleet yet; m3pc resume {run} starts it")
    else:
        Console(highlight=False).print(page(current))


def scale(
    run: RunPath,
    actors: Annotated[
        int | None, typer.Argument(min=0, help="Number of rollout processes, from now on.")
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(
            metavar="LEAST:MOST",
            help="Scale with the load, between these numbers of rollout processes, such as 2:8.",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until that many run.")
    ] = 120.0,
) -> None:
    """Change the number of rollout processes of a running job. No acknowledged episode is lost."""
    from m3pc.online.run_control import request
    from m3pc.types import InputError

    if (actors is None) == (between is None):
        raise InputError("give a number of rollout processes, or --between LEAST:MOST")
    bounds = _bounds(between) if between is not None else None
    _require_driver(run)
    if bounds is not None:
        request(run, bounds=bounds)
        typer.echo(f"actors: scaled with the load, between {bounds[0]} and {bounds[1]}")
        return
    request(run, actors=actors)
    last = _wait(run, wait, lambda now: now.get("running") == now.get("wanted") == actors)
    typer.echo(f"actors running: {last.get('running', 0)}, wanted: {actors}")
    if last.get("running") != actors:
        raise typer.Exit(1)


def stop(
    run: RunPath,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for its end.")] = 60.0,
) -> None:
    """Stop a running job in order: its episodes are stored and a checkpoint is written."""
    from m3pc.online.run_control import request

    _require_driver(run)
    request(run, stop=True)
    last = _wait(run, wait, lambda now: not now["driven"])
    if last["driven"]:
        typer.echo(f"{run} was asked to stop and has not ended within {wait:g} s")
        raise typer.Exit(1)
    typer.echo(f"stopped after {last.get('steps', 0):,} steps; m3pc resume {run} continues it")


def _bounds(text: str) -> tuple[int, int]:
    from m3pc.types import InputError

    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal()):
        raise InputError(f"--between is {text!r}; give two numbers such as 2:8")
    return int(low), int(high)


def _require_driver(run: Path) -> None:
    from m3pc.online.run_control import has_driver, read_status
    from m3pc.online.run_folder import open_run
    from m3pc.types import InputError

    open_run(run)
    current = read_status(run)
    if not current["driven"]:
        raise InputError(f"{run} does not run; start it with m3pc resume {run}")
    if not has_driver(current):
        raise InputError(
            f"{_NO_DRIVER.format(run)}; end a run in one process with Ctrl-C, or wait for the fleet"
        )


def _wait(run: Path, seconds: float, is_done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status that is done, or the last one when the time is over."""
    from m3pc.online.run_control import read_status

    end = time.monotonic() + seconds
    while True:
        current = read_status(run)
        if is_done(current) or time.monotonic() >= end:
            return current
        time.sleep(POLL_SECONDS)


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: _without_nan(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_without_nan(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
