"""`m3pc goal`: reach given states with a checkpoint; `m3pc goal-compare`: with several models."""

import hashlib
import json
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m3pc.cli.options import CheckpointPath, Processes, Seed, Sets, check_picture, store_path

if TYPE_CHECKING:
    from m3pc.evaluation.goals import GoalCase, GoalJob, GoalOutcome
    from m3pc.evaluation.video import RgbFrame

FILMSTRIP_FRAMES = 8
MIN_WIDTH = 88  # columns of a table of three means with intervals


GoalTaskName = Annotated[
    str | None,
    typer.Option(
        help="Task to play: hopper-wiggle, walker-split, cheetah-flip, can-throw, can-place or "
        "can-nearer."
    ),
]
GoalGoals = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Your own states to reach, as .npy, .csv or .json (docs/GOALS.md); with --task, "
        "they replace its waypoints.",
    ),
]
GoalEnv = Annotated[
    str | None,
    typer.Option(help="Environment id. Default: the task's, or that of the training data."),
]
GoalData = Annotated[
    str | None,
    typer.Option(
        metavar="STORE",
        help="Store of the training data: needed for some waypoints, and to measure how far "
        "goals lie from the data.",
    ),
]
GoalWaypoints = Annotated[
    str | None,
    typer.Option(
        help="Kind of the task's waypoints: paper or released, for cheetah-flip also recorded. "
        "Default: goal.waypoints of CKPT."
    ),
]
GoalFrequency = Annotated[
    list[float] | None,
    typer.Option(
        min=0,
        max=500,
        help="hopper-wiggle: cycles per 1000 steps. May be repeated. Default: the task's.",
    ),
]
GoalSpacing = Annotated[
    int | None,
    typer.Option(
        min=1, help="Rows of waypoints that share a subgoal. Default: goal.spacing of CKPT."
    ),
]
GoalKey = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        help="Dimension of a state that is compared with the goal. May be repeated. Default: "
        "the task's.",
    ),
]
GoalWithin = Annotated[
    float | None,
    typer.Option(
        min=0, help="Largest distance of a success, in the key's unit. Default: the task's."
    ),
]
GoalSteps = Annotated[
    int | None,
    typer.Option(min=1, help="Steps per episode. Default: the task's, or to the last goal."),
]
GoalOut = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder for results. Default: a name in goals/ of CKPT's run."
    ),
]


def goal(
    checkpoint: CheckpointPath,
    task: GoalTaskName = None,
    goals: GoalGoals = None,
    env: GoalEnv = None,
    data: GoalData = None,
    waypoints: GoalWaypoints = None,
    frequency: GoalFrequency = None,
    spacing: GoalSpacing = None,
    planner: Annotated[
        list[str] | None, typer.Option(help="goal or goal-mask. Default: both, compared.")
    ] = None,
    key: GoalKey = None,
    within: GoalWithin = None,
    steps: GoalSteps = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes per planner.")] = 10,
    seed: Seed = 0,
    sets: Sets = None,
    out: GoalOut = None,
    video: Annotated[
        bool, typer.Option(help="Record a video of each planner's first episode.")
    ] = True,
    processes: Processes = 0,
) -> None:
    """Steer towards given states, with two backward planners on the same initial states."""
    from m3pc.cli.evaluate import run_folder
    from m3pc.cli.progress import progress
    from m3pc.core.files import replace_file
    from m3pc.evaluation.goal_pictures import draw_states, draw_tracking
    from m3pc.evaluation.goal_results import result_json
    from m3pc.evaluation.goals import GoalRequest, make_goal_job

    job = make_goal_job(
        GoalRequest(
            path=checkpoint,
            task=task,
            goals=goals,
            env=env,
            data=None if data is None else store_path(data),
            waypoints=waypoints,
            cycles=tuple(dict.fromkeys(frequency or ())),
            spacing=spacing,
            key=tuple(dict.fromkeys(key or ())),
            tolerance=within,
            steps=steps,
            episodes=episodes,
            seed=seed,
            sets=tuple(sets or ()),
            **({"planners": tuple(dict.fromkeys(planner))} if planner else {}),
        )
    )
    folder = out or run_folder(checkpoint) / "goals" / _stem(job)
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for case in job.cases:
        played: dict[str, GoalOutcome] = {}
        for mode in job.policies:
            with progress(f"{case.name} by {mode}", "steps") as report:
                played[mode] = job.play(case, mode, report, processes)
        outcomes.append((case, played))
    result = result_json(job, outcomes)
    _show(result)
    for case in job.cases:
        typer.echo(f"{case.name}: {case.note}")
    replace_file(folder / "result.json", (json.dumps(result) + "\n").encode())
    draw_tracking(result, folder / "tracking.png")
    _print_path("JSON", folder / "result.json")
    _print_path("picture", folder / "tracking.png")
    if job.data:
        draw_states(job, outcomes, folder / "states.png")
        _print_path("picture", folder / "states.png")
    for case in job.cases if video else ():
        _film(job, case, folder)


def compare(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Files result.json of m3pc goal, one per trained model."
        ),
    ],
    png: Annotated[
        Path | None,
        typer.Option(callback=check_picture, help="File for a picture of the key and its goal."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="File for the numbers. Default: none.")
    ] = None,
) -> None:
    """Average the results of several trained models: means with 95 % intervals over models."""
    from m3pc.core.files import replace_file
    from m3pc.evaluation.goal_comparison import merge_results
    from m3pc.evaluation.goal_pictures import draw_tracking

    result = merge_results(files)
    _show(result)
    if png is not None:
        draw_tracking(result, png)
        _print_path("picture", png)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, (json.dumps(result) + "\n").encode())
        _print_path("JSON", out)


def _stem(job: "GoalJob") -> str:
    """A folder name that differs between requests, so that no result overwrites another."""
    own = b"" if job.request.goals is None else job.request.goals.read_bytes()
    identity = (astuple(job.request), job.weights.digest, hashlib.sha256(own).hexdigest())
    rest = hashlib.sha256(repr(identity).encode()).hexdigest()[:8]
    name, seed = job.task.name.replace(" ", "-"), job.request.seed
    return f"{name}-{job.waypoint_kind}-seed{seed}-{rest}"


def _film(job: "GoalJob", case: "GoalCase", folder: Path) -> None:
    from m3pc.plots import filmstrip

    rows: dict[str, list[tuple[int, RgbFrame]]] = {}
    for mode in job.policies:
        path = folder / f"{case.name.replace(' ', '-')}-{mode}.mp4"
        frames = job.film(case, mode, path)
        last = len(frames) - 1
        rows[mode] = [
            frames[round(last * n / (FILMSTRIP_FRAMES - 1))] for n in range(FILMSTRIP_FRAMES)
        ]
        _print_path("video", path)
    waypoints = job.render_waypoints(case, [step for step, _ in rows[mode]])
    if waypoints:
        rows["goal states"] = waypoints
    path = folder / f"{case.name.replace(' ', '-')}-filmstrip.png"
    filmstrip(path, rows, title=f"{case.name}, seed {job.request.seed}, first episode")
    _print_path("picture", path)


def _print_path(kind: str, path: Path) -> None:
    typer.echo(f"{kind}: {path}")


def _show(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from m3pc.config.schema import BACKWARD

    console = Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    count = len(result.get("models", ()))
    if count:
        sample = f"{count} trained model{'s' if count > 1 else ''}"
    else:
        sample = f"{result['episodes']} episodes of seed {result['seed']}, {result['engine']}"
    console.print(
        f"{result['task']}, waypoints {result['waypoints']}, a subgoal every {result['spacing']} "
        f"steps, {result['steps']} steps, {sample}",
        soft_wrap=True,
    )
    console.print(
        f"key: {'; '.join(result['key_names'])}. Success: {result['success']}", soft_wrap=True
    )
    for case in result["cases"]:
        columns = {mode: numbers["summary"] for mode, numbers in case["planners"].items()}
        if case["difference"]:
            columns[" - ".join(BACKWARD)] = case["difference"]
        table = Table(title=case["name"], title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("mean [95 %]", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for measure in result["measures"]:
            table.add_row(measure, *(_cell(column[measure]) for column in columns.values()))
        console.print(table)
        _show_distances(case)


def _show_distances(case: dict[str, Any]) -> None:
    distances = case.get("out_of_distribution")
    if distances:
        visited = ", ".join(f"{mode} {value:.1f}" for mode, value in distances["visited"].items())
        typer.echo(
            "distance to the nearest state of the data, over the typical one: "
            f"goals {distances['goals']:.1f}, visited by {visited}"
        )


def _cell(estimate: dict[str, Any]) -> str:
    """A mean and its 95 % interval, if there is one."""
    if estimate["low"] is None:
        return f"{estimate['mean']:.3f}"
    return f"{estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
