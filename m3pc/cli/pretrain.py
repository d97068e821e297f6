"""`m3pc pretrain`: the trajectory model and the critic, from a store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from m3pc.run.pretrain import Pretrained


def pretrain(
    data: Annotated[
        str | None, typer.Option(help="A store, or shipped:NAME. A resumed run knows its own.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="parity, paper or small.")] = None,
    file: Annotated[Path | None, typer.Option(help="YAML with the fields that differ.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set one field. May be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same as --set seed=N.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/DATA-PRESET-seedN.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run, as if it had never stopped.")
    ] = None,
) -> None:
    """Learn from logged episodes; end with what decides whether planning can work."""
    from m3pc.cli.data import open_store
    from m3pc.cli.progress import progress
    from m3pc.presets import DEFAULT_PRESET, resolve
    from m3pc.run.pretrain import draw_curve, start
    from m3pc.run.pretrain import resume as go_on
    from m3pc.types import InputError

    store = open_store(data) if data is not None else None
    if resume is not None:
        if preset or file or sets or out or seed is not None:
            raise InputError("a resumed run has its settings and its place; give --resume alone")
        run = resume
    elif store is None:
        raise InputError("there is nothing to learn from; give --data STORE, or --resume RUN")
    else:
        chosen = [*(sets or ()), *([] if seed is None else [f"seed={seed}"])]
        config = resolve(preset=preset, file=file, sets=chosen)
        name = f"{store.path.resolve().name}-{preset or DEFAULT_PRESET}-seed{config.seed}"
        run = out or Path("runs") / name
        start(store, config, run)
    with progress(f"pretraining {run.name}", "updates") as report:
        done = go_on(run, report, data=store)
    _show(done)
    typer.echo(f"picture: {draw_curve(run)}")


def _show(done: "Pretrained") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    found = done.measures
    if found:
        table = Table(
            "on held-out episodes", "found", "to compare with", title="can planning work?"
        )
        rows = (
            ("state after 1 step", "state_1", found["copy_1"], "copy the last state"),
            ("state after h steps", "state_h", found["copy_h"], "copy the last state"),
            ("reward", "reward", 1.0, "answer the mean, about"),
            ("return", "return", 1.0, "answer the mean, about"),
            ("action", "action", None, ""),
        )
        for label, name, other, words in rows:
            compared = "" if other is None else f"{other:.4f}  {words}"
            table.add_row(f"{label}, squared error", f"{found[name]:.4f}", compared)
        for name in ("v", "q"):
            seen = f"{found['seen_mean']:.1f}  discounted return, seen"
            table.add_row(
                f"{name.upper()}, mean (correlation)",
                f"{found[f'{name}_mean']:.1f} ({found[f'{name}_correlation']:.2f})",
                seen,
            )
        console.print(table)
    else:
        console.print("no episode was held out (dataset.train_share), so nothing was measured")
    console.print(f"run: {done.path}  weights: {done.weights.digest[:16]}")
