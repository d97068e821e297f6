"""`m3pc evaluate`: play a checkpoint's planners and say how well they did."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from m3pc.run.evaluate import Played


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A run or checkpoint.")],
    env: Annotated[
        str | None, typer.Option(help="Environment id; default: the one the data came from.")
    ] = None,
    planner: Annotated[
        list[str] | None,
        typer.Option(help="rcbc, m, q, q0, goal or goal-mask. May be repeated, to compare."),
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
        Path | None, typer.Option(help=".npy of states to reach, a row a step: for goal modes.")
    ] = None,
    spacing: Annotated[int, typer.Option(min=1, help="Rows of it that share a subgoal.")] = 1,
    video: Annotated[bool, typer.Option("--video", help="Film the first episode too.")] = False,
    out: Annotated[
        Path | None, typer.Option("--json", help="Everything as JSON; default CKPT/evaluations/.")
    ] = None,
) -> None:
    """Play episodes that depend on the seed alone; print return, score, speed; keep JSON."""
    from m3pc.cli.progress import progress
    from m3pc.run.evaluate import Order, match, modes

    names = modes(planner or ["m"])
    order = Order(
        path=checkpoint,
        env_id=env,
        episodes=episodes,
        seed=seed,
        ratio=ratio,
        sets=tuple(sets or ()),
        waypoints=waypoints,
        spacing=spacing,
    )
    played = []
    matches = [match(order, name) for name in names]
    for one in matches:
        with progress(f"playing {one.mode}", "episodes") as report:
            played.append(one.play(report))
    _show(played)
    stem = f"{'-'.join(names)}-seed{seed}"
    file = out or checkpoint / "evaluations" / f"{stem}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([one.as_json() for one in played], indent=1) + "\n")
    typer.echo(f"JSON: {file}")
    for one in matches if video else []:
        path = file.with_name(f"{one.mode}-seed{seed}.mp4")
        one.film(path)
        typer.echo(f"video: {path}")


def _show(played: "list[Played]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    first = played[0].evaluation
    title = f"{first.env_id}, {len(first.returns)} episodes, seed {first.seed}, {first.engine}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("planner", "return", "score", "steps", "asked", "ratio", "plans", "per s"):
        table.add_column(name, justify="left" if name == "planner" else "right", no_wrap=True)
    for one in played:
        found = one.evaluation
        score = "" if found.score is None else f"{found.score:.1f} ± {found.score_error:.1f}"
        effective, asked = found.effective.mean(), found.first_conditions.mean()
        table.add_row(
            one.mode,
            f"{found.mean:.0f} ± {found.standard_error:.0f}",
            score,
            f"{found.lengths.mean():.0f}",
            "" if math.isnan(asked) else f"{asked:.3g}",
            "" if math.isnan(asked) else f"{one.ratio:g}",
            "" if math.isnan(effective) else f"{effective:.1f}",
            f"{found.decisions_per_second:.0f}",
        )
    Console(highlight=False).print(table)
