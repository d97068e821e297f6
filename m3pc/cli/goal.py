"""`m3pc goal`: drive a checkpoint to states it never saw; `m3pc goal-compare`: several models."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m3pc.cli.picture import picture
from m3pc.cli.processes import Processes

if TYPE_CHECKING:
    from m3pc.evaluation.goals import Case, GoalOutcome, Trial
    from m3pc.evaluation.video import RgbFrame

STRIP = 8  # pictures of a filmstrip
NARROWEST = 88  # columns that a table of three means with intervals takes


def goal(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A run or checkpoint.")],
    task: Annotated[
        str | None,
        typer.Option(
            help="hopper-wiggle, walker-split, cheetah-flip, can-throw, can-place or can-nearer."
        ),
    ] = None,
    goals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Goals of your own, .npy, .csv or .json (docs/GOALS.md); with --task, in place of "
            "its waypoints.",
        ),
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="Environment; default: the task's, or the data's.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="STORE", help="Data set: some waypoints need it, and so does the PCA."
        ),
    ] = None,
    waypoints: Annotated[
        str | None,
        typer.Option(
            help="paper or released, for cheetah-flip also recorded; default: goal.waypoints of "
            "the checkpoint."
        ),
    ] = None,
    frequency: Annotated[
        list[float] | None,
        typer.Option(
            min=0, max=500, help="Cycles in 1000 steps, for hopper-wiggle. May be repeated."
        ),
    ] = None,
    spacing: Annotated[
        int | None, typer.Option(min=1, help="Rows that share a subgoal; default: goal.spacing.")
    ] = None,
    planner: Annotated[
        list[str] | None, typer.Option(help="goal or goal-mask; default: both, compared.")
    ] = None,
    key: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Dimension of a state that counts. May be repeated."),
    ] = None,
    within: Annotated[
        float | None, typer.Option(min=0, help="Tolerance of success, in the key's unit.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of an episode.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="For each planner.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of resets.")] = 0,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change how to plan. May be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Default: goals/ beside the checkpoints.")
    ] = None,
    video: Annotated[bool, typer.Option(help="Film the first episode of each planner.")] = True,
    processes: Processes = 0,
) -> None:
    """Follow waypoints by path inference and by one mask: same weights, same first states."""
    from m3pc.cli.data import store_path
    from m3pc.cli.evaluate import run_folder
    from m3pc.cli.progress import progress
    from m3pc.core.files import replace_file
    from m3pc.evaluation import goal_results
    from m3pc.evaluation.goals import GoalRequest, trial

    ready = trial(
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
    folder = out or run_folder(checkpoint) / "goals" / _stem(ready)
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for case in ready.cases:
        played: dict[str, GoalOutcome] = {}
        for mode in ready.policies:
            with progress(f"{case.name} by {mode}", "steps") as report:
                played[mode] = ready.play(case, mode, report, processes)
        outcomes.append((case, played))
    result = goal_results.as_json(ready, outcomes)
    _show(result)
    for case in ready.cases:
        typer.echo(f"{case.name}: {case.note}")
    replace_file(folder / "result.json", (json.dumps(result) + "\n").encode())
    goal_results.draw_tracking(result, folder / "tracking.png")
    _say("JSON", folder / "result.json")
    _say("picture", folder / "tracking.png")
    if ready.data:
        goal_results.draw_states(ready, outcomes, folder / "states.png")
        _say("picture", folder / "states.png")
    for case in ready.cases if video else ():
        _film(ready, case, folder)


def compare(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="result.json of m3pc goal, one a trained model."),
    ],
    png: Annotated[
        Path | None, typer.Option(callback=picture, help="Draw the key against the goal.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Keep the numbers.")] = None,
) -> None:
    """The same task with several trained models: means over models with 95 % intervals."""
    from m3pc.core.files import replace_file
    from m3pc.evaluation import goal_results

    result = goal_results.merged(files)
    _show(result)
    if png is not None:
        goal_results.draw_tracking(result, png)
        _say("picture", png)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, (json.dumps(result) + "\n").encode())
        _say("JSON", out)


def _stem(ready: "Trial") -> str:
    """One result does not overwrite another that was played otherwise."""
    import hashlib

    own = b"" if ready.order.goals is None else ready.order.goals.read_bytes()
    asked = (ready.order, ready.weights.digest, hashlib.sha256(own).hexdigest())
    rest = hashlib.sha256(repr(asked).encode()).hexdigest()[:8]
    return f"{ready.task.name.replace(' ', '-')}-{ready.kind}-seed{ready.order.seed}-{rest}"


def _film(ready: "Trial", case: "Case", folder: Path) -> None:
    from m3pc.plots import filmstrip

    rows: dict[str, list[tuple[int, RgbFrame]]] = {}
    for mode in ready.policies:
        path = folder / f"{case.name.replace(' ', '-')}-{mode}.mp4"
        frames = ready.film(case, mode, path)
        last = len(frames) - 1
        rows[mode] = [frames[round(last * n / (STRIP - 1))] for n in range(STRIP)]
        _say("video", path)
    wanted = ready.wanted(case, [step for step, _ in rows[mode]])
    if wanted:
        rows["wanted"] = wanted
    path = folder / f"{case.name.replace(' ', '-')}-filmstrip.png"
    filmstrip(path, rows, title=f"{case.name}, seed {ready.order.seed}, first episode")
    _say("picture", path)


def _say(what: str, path: Path) -> None:
    typer.echo(f"{what}: {path}")


def _show(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from m3pc.config.schema import BACKWARD

    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    count = len(result.get("models", ()))
    who = (
        f"{count} trained model{'s' if count > 1 else ''}"
        if count
        else (f"{result['episodes']} episodes of seed {result['seed']}, {result['engine']}")
    )
    console.print(
        f"{result['task']}, waypoints {result['waypoints']}, a subgoal every {result['spacing']} "
        f"steps, {result['steps']} steps, {who}",
        soft_wrap=True,
    )
    console.print(
        f"key: {'; '.join(result['key_names'])}. Success: {result['success']}", soft_wrap=True
    )
    for case in result["cases"]:
        columns = {mode: found["summary"] for mode, found in case["planners"].items()}
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
    found = case.get("out_of_distribution")
    if found:
        visited = ", ".join(f"{mode} {value:.1f}" for mode, value in found["visited"].items())
        typer.echo(
            "distance to the nearest state of the data, over the typical one: "
            f"goals {found['goals']:.1f}, visited by {visited}"
        )


def _cell(found: dict[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['mean']:.3f}"
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
