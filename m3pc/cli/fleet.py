"""`m3pc status`, `scale`, `stop`: look at a run and change its fleet, from any shell."""

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an online run.")]
POLL = 0.5  # seconds
_SILENT = "{} runs in one process (--local), or its fleet is just starting"


def status(
    run: Run,
    json_: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """What a run does now, or did last."""
    import json

    from rich.console import Console

    from m3pc.cli.live import page
    from m3pc.online.run_control import has_driver, read_status
    from m3pc.online.run_folder import open_run

    open_run(run)
    found = read_status(run)
    if json_:
        typer.echo(json.dumps(_finite(found)))
    elif found["driven"] and not has_driver(found):
        typer.echo(f"{_SILENT.format(run)}; its numbers are in {run / 'metrics.jsonl'}")
    elif "state" not in found:
        typer.echo(f"{run} has not run on a fleet yet; m3pc resume {run} starts it")
    else:
        Console(highlight=False).print(page(found))


def scale(
    run: Run,
    actors: Annotated[
        int | None, typer.Argument(min=0, help="Rollout processes from now on.")
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(metavar="LEAST:MOST", help="Let the load decide, between these bounds."),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for it.")] = 120.0,
) -> None:
    """Change how many rollout processes a running job has. Nothing acknowledged is lost."""
    from m3pc.online.run_control import request
    from m3pc.types import InputError

    if (actors is None) == (between is None):
        raise InputError("give a number of rollout processes, or --between LEAST:MOST")
    bounds = _bounds(between) if between is not None else None
    _require_driven(run)
    if bounds is not None:
        request(run, between=bounds)
        typer.echo(f"actors: as the load asks, between {bounds[0]} and {bounds[1]}")
        return
    request(run, actors=actors)
    found = _wait(run, wait, lambda now: now.get("running") == now.get("wanted") == actors)
    typer.echo(f"actors running: {found.get('running', 0)}, wanted: {actors}")
    if found.get("running") != actors:
        raise typer.Exit(1)


def stop(
    run: Run,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for it.")] = 60.0,
) -> None:
    """End a running job in order: episodes are stored, a checkpoint is written."""
    from m3pc.online.run_control import request

    _require_driven(run)
    request(run, stop=True)
    found = _wait(run, wait, lambda now: not now["driven"])
    if found["driven"]:
        typer.echo(f"{run} was told to stop and has not ended within {wait:g} s")
        raise typer.Exit(1)
    typer.echo(f"stopped after {found.get('steps', 0):,} steps; m3pc resume {run} goes on")


def _bounds(text: str) -> tuple[int, int]:
    from m3pc.types import InputError

    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal()):
        raise InputError(f"--between is {text!r}; give two numbers such as 2:8")
    return int(least), int(most)


def _require_driven(run: Path) -> None:
    from m3pc.online.run_control import has_driver, read_status
    from m3pc.online.run_folder import open_run
    from m3pc.types import InputError

    open_run(run)
    found = read_status(run)
    if not found["driven"]:
        raise InputError(f"{run} does not run; start it with m3pc resume {run}")
    if not has_driver(found):
        raise InputError(f"{_SILENT.format(run)}; end the first with Ctrl-C, or wait for the other")


def _wait(run: Path, seconds: float, done: Any) -> dict[str, Any]:
    from m3pc.online.run_control import read_status

    end = time.monotonic() + seconds
    while True:
        found = read_status(run)
        if done(found) or time.monotonic() >= end:
            return found
        time.sleep(POLL)


def _finite(found: Any) -> Any:
    """JSON has no word for NaN."""
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
