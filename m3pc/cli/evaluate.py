"""`m3pc evaluate`: play episodes with a checkpoint's planners, compare the results, keep them."""

import hashlib
import json
import math
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.options import CheckpointPath, Processes, Seed, Sets, TargetRatio

if TYPE_CHECKING:
    from m3pc.evaluation.episodes import Evaluation
    from m3pc.evaluation.jobs import EvaluationJob, EvaluationRequest, EvaluationResult


EvaluatePlanner = Annotated[
    list[str] | None,
    typer.Option(
        help="rcbc, m, q, q0, goal or goal-mask; q@0.9 also sets its --ratio. Repeat to "
        "compare several. Default: planner.mode of CKPT."
    ),
]
EvaluateWaypoints = Annotated[
    Path | None,
    typer.Option(
        help="For goal and goal-mask: states to reach, a .npy or .csv with a row per step."
    ),
]
EvaluateSpacing = Annotated[
    int | None,
    typer.Option(
        min=1, help="Rows of --waypoints that share a subgoal. Default: goal.spacing of CKPT."
    ),
]
EvaluateFinetuned = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Also play the newest weights of this online run, with the planner of its "
        "evaluations, and compare with that planner of CKPT on the same episodes.",
    ),
]
EvaluateReuse = Annotated[
    bool,
    typer.Option(
        "--reuse", help="Take equal evaluations from CKPT/evaluations/ instead of playing."
    ),
]
EvaluateOut = Annotated[
    Path | None,
    typer.Option("--json", help="File for the results. Default: a name in CKPT/evaluations/."),
]


def evaluate(
    checkpoint: CheckpointPath,
    env: Annotated[
        str | None, typer.Option(help="Environment id. Default: that of the training data.")
    ] = None,
    planner: EvaluatePlanner = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes per planner.")] = 20,
    seed: Seed = 0,
    ratio: TargetRatio = None,
    sets: Sets = None,
    waypoints: EvaluateWaypoints = None,
    spacing: EvaluateSpacing = None,
    finetuned: EvaluateFinetuned = None,
    reuse: EvaluateReuse = False,
    processes: Processes = 0,
    video: Annotated[
        bool, typer.Option("--video", help="Record a video of each planner's first episode.")
    ] = False,
    out: EvaluateOut = None,
) -> None:
    """Play episodes and print return, score, success and speed; write the results as JSON."""
    from m3pc.cli.progress import progress
    from m3pc.core.files import replace_file
    from m3pc.evaluation.jobs import EvaluationRequest, make_jobs
    from m3pc.online import comparison
    from m3pc.types import InputError

    request = EvaluationRequest(
        path=checkpoint,
        env_id=env,
        episodes=episodes,
        seed=seed,
        ratio=ratio,
        sets=tuple(sets or ()),
        waypoints=waypoints,
        spacing=spacing,
    )
    jobs = make_jobs(request, planner or ())
    before = None
    if finetuned is not None:
        before, after = comparison.comparison_jobs(finetuned, jobs)
        jobs.append(after)
    if (waypoints or spacing) and not any(job.waypoints is not None for job in jobs):
        raise InputError("--waypoints and --spacing are for the planners goal and goal-mask")
    folder = run_folder(checkpoint) / "evaluations"
    file = out or folder / f"{_default_name(request, jobs)}.json"
    if file.is_dir():
        raise InputError(f"--json is {file}, a folder; give a file")
    file.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for job in jobs:
        result = job.earlier_result(folder) if reuse else None
        if result is None:
            with progress(f"playing {job.name}", "episodes") as report:
                result = job.play(report, processes)
        results.append(result)
    _show(results)
    rows = [result.as_json() for result in results]
    if finetuned is not None and before is not None:
        pair = comparison.FinetuneComparison(
            run=finetuned, before=results[jobs.index(before)], after=results[-1]
        )
        typer.echo(pair.sentence())
        rows[-1]["finetuned"] = pair.as_json()
    replace_file(file, (json.dumps(rows, indent=1) + "\n").encode())
    typer.echo(f"JSON: {file}")
    for job in jobs if video else []:
        path = file.with_name(f"{job.name}-seed{seed}.mp4")
        job.film(path)
        typer.echo(f"video: {path}")


def run_folder(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's run, which outlives it; without a run, the checkpoint."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def _default_name(request: "EvaluationRequest", jobs: "list[EvaluationJob]") -> str:
    """A file name that differs between evaluations: planners, seed, a hash of everything else."""
    identity = (
        astuple(replace(request, path=Path())),
        sorted({job.policy.weights.digest for job in jobs}),
        [job.policy.config.conditioning.evaluation_ratio for job in jobs],
    )
    rest = hashlib.sha256(repr(identity).encode()).hexdigest()[:8]
    return f"{'-'.join(job.name for job in jobs)}-seed{request.seed}-{rest}"


def _show(results: "list[EvaluationResult]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    first = results[0].evaluation
    title = f"{first.env_id}, {len(first.returns)} episodes, seed {first.seed}, {first.engine}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    has_success = first.successes is not None
    kind = "success" if has_success else "score"  # no environment has both
    for name in ("planner", "return", kind, "steps", "target", "ratio", "candidates", "plans/s"):
        table.add_column(name, justify="left" if name == "planner" else "right", no_wrap=True)
    for result in results:
        played = result.evaluation
        score = "" if played.score is None else _with_error(played.score, played.score_error, 1)
        candidates = played.effective_candidates.mean()
        target = played.first_target_returns.mean()
        table.add_row(
            result.name,
            _with_error(played.mean, played.standard_error, 2 if has_success else 0),
            _success(played) if has_success else score,
            f"{played.lengths.mean():.0f}",
            "" if math.isnan(target) else f"{target:.3g}",
            "" if math.isnan(target) else f"{result.ratio:g}",
            "" if math.isnan(candidates) else f"{candidates:.1f}",
            f"{played.decisions_per_second:.0f}",
        )
    Console(highlight=False).print(table)


def _success(evaluation: "Evaluation") -> str:
    """The success rate and its 95 % interval, such as 67 % [21, 94]."""
    assert evaluation.success_rate is not None and evaluation.success_interval is not None
    low, high = (100 * bound for bound in evaluation.success_interval)
    return f"{100 * evaluation.success_rate:.0f} % [{low:.0f}, {high:.0f}]"


def _with_error(value: float, error: float | None, digits: int) -> str:
    if error is None or math.isnan(error):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ± {error:.{digits}f}"
