"""`m3pc evaluate`: play a checkpoint's planners and say how well they did."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.processes import Processes

if TYPE_CHECKING:
    from m3pc.evaluation.episodes import Evaluation
    from m3pc.evaluation.evaluate import EvaluationJob, EvaluationRequest, EvaluationResult


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A run or checkpoint.")],
    env: Annotated[
        str | None, typer.Option(help="Environment id; default: the one the data came from.")
    ] = None,
    planner: Annotated[
        list[str] | None,
        typer.Option(
            help="rcbc, m, q, q0, goal or goal-mask; q@0.9 has a ratio of its own. May be "
            "repeated, to compare. Default: planner.mode of the checkpoint."
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes for each planner.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of resets and candidates.")] = 0,
    ratio: Annotated[
        float | None,
        typer.Option(min=0, max=10, help="Ask for this times the best return of the data."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change how to plan. May be repeated."),
    ] = None,
    waypoints: Annotated[
        Path | None,
        typer.Option(help=".npy or .csv of states to reach, a row a step: for goal modes."),
    ] = None,
    spacing: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of it that share a subgoal; default: goal.spacing."),
    ] = None,
    finetuned: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Play the newest weights of this online run too, by the planner that it is "
            "evaluated with, and compare with the same planner of CKPT on the same episodes.",
        ),
    ] = None,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse", help="Do not play again what CKPT/evaluations/ has of the very same."
        ),
    ] = False,
    processes: Processes = 0,
    video: Annotated[bool, typer.Option("--video", help="Film the first episode too.")] = False,
    out: Annotated[
        Path | None, typer.Option("--json", help="Everything as JSON; default CKPT/evaluations/.")
    ] = None,
) -> None:
    """Play episodes that depend on the seed alone; print return, score, speed; keep JSON."""
    from m3pc.cli.progress import progress
    from m3pc.core.files import replace_file
    from m3pc.evaluation.evaluate import EvaluationRequest, matches
    from m3pc.online import comparison
    from m3pc.types import InputError

    order = EvaluationRequest(
        path=checkpoint,
        env_id=env,
        episodes=episodes,
        seed=seed,
        ratio=ratio,
        sets=tuple(sets or ()),
        waypoints=waypoints,
        spacing=spacing,
    )
    ready = matches(order, planner or ())
    before = None
    if finetuned is not None:
        before, after = comparison.finetuned(finetuned, ready)
        ready.append(after)
    if (waypoints or spacing) and not any(one.waypoints is not None for one in ready):
        raise InputError("--waypoints and --spacing are for the planners goal and goal-mask")
    file = out or _folder(checkpoint) / f"{_stem(order, ready)}.json"
    if file.is_dir():
        raise InputError(f"--json is {file}, a folder; give a file")
    file.parent.mkdir(parents=True, exist_ok=True)
    played = []
    for one in ready:
        found = one.kept(_folder(checkpoint)) if reuse else None
        if found is None:
            with progress(f"playing {one.name}", "episodes") as report:
                found = one.play(report, processes)
        played.append(found)
    _show(played)
    rows = [one.as_json() for one in played]
    if finetuned is not None and before is not None:
        pair = comparison.FinetuneComparison(
            run=finetuned, before=played[ready.index(before)], after=played[-1]
        )
        typer.echo(pair.sentence())
        rows[-1]["finetuned"] = pair.as_json()
    replace_file(file, (json.dumps(rows, indent=1) + "\n").encode())
    typer.echo(f"JSON: {file}")
    for one in ready if video else []:
        path = file.with_name(f"{one.name}-seed{seed}.mp4")
        one.film(path)
        typer.echo(f"video: {path}")


def run_folder(checkpoint: Path) -> Path:
    """Of the run that it belongs to: what is kept there stays when old checkpoints go."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def _folder(checkpoint: Path) -> Path:
    return run_folder(checkpoint) / "evaluations"


def _stem(order: "EvaluationRequest", ready: "list[EvaluationJob]") -> str:
    """Planners and seed, and a hash of all else: one result does not overwrite another."""
    asked = (
        replace(order, path=Path()),
        sorted({one.policy.weights.digest for one in ready}),
        [one.policy.config.conditioning.evaluation_ratio for one in ready],
    )
    rest = hashlib.sha256(repr(asked).encode()).hexdigest()[:8]
    return f"{'-'.join(one.name for one in ready)}-seed{order.seed}-{rest}"


def _show(played: "list[EvaluationResult]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    first = played[0].evaluation
    title = f"{first.env_id}, {len(first.returns)} episodes, seed {first.seed}, {first.engine}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    rated = first.successes is not None
    kind = "success" if rated else "score"  # of D4RL's environments: none has both
    for name in ("planner", "return", kind, "steps", "asked", "ratio", "plans", "per s"):
        table.add_column(name, justify="left" if name == "planner" else "right", no_wrap=True)
    for one in played:
        found = one.evaluation
        score = "" if found.score is None else _with_error(found.score, found.score_error, 1)
        effective, asked = found.effective.mean(), found.first_conditions.mean()
        table.add_row(
            one.name,
            _with_error(found.mean, found.standard_error, 2 if rated else 0),
            _success(found) if rated else score,
            f"{found.lengths.mean():.0f}",
            "" if math.isnan(asked) else f"{asked:.3g}",
            "" if math.isnan(asked) else f"{one.ratio:g}",
            "" if math.isnan(effective) else f"{effective:.1f}",
            f"{found.decisions_per_second:.0f}",
        )
    Console(highlight=False).print(table)


def _success(found: "Evaluation") -> str:
    """The rate and its interval: 67 % [21, 94]."""
    assert found.success_rate is not None and found.success_interval is not None
    low, high = (100 * bound for bound in found.success_interval)
    return f"{100 * found.success_rate:.0f} % [{low:.0f}, {high:.0f}]"


def _with_error(value: float, error: float | None, digits: int) -> str:
    if error is None or math.isnan(error):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ± {error:.{digits}f}"
