"""`m3pc pretrain`: the trajectory model and the critic, from a store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.track import TrackOption

if TYPE_CHECKING:
    from m3pc.training.pretrain import Pretrained


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
    track: TrackOption = "",
) -> None:
    """Learn from logged episodes; end with what decides whether planning can work."""
    from m3pc.cli.data import open_store
    from m3pc.cli.progress import progress
    from m3pc.config.overrides import flatten
    from m3pc.config.presets import DEFAULT_PRESET, of_environment, resolve
    from m3pc.tracking.trackers import require
    from m3pc.training.pretrain import draw_curve, start
    from m3pc.training.pretrain import resume as go_on
    from m3pc.types import InputError

    require(track)
    store = open_store(data) if data is not None else None
    if resume is not None:
        if preset or file or sets or out or seed is not None:
            raise InputError("a resumed run has its settings and its place; give --resume alone")
        run = resume
    elif store is None:
        raise InputError("there is nothing to learn from; give --data STORE, or --resume RUN")
    else:
        chosen = [*(sets or ()), *([] if seed is None else [f"seed={seed}"])]
        config = resolve(preset=preset, env=store.header.env, file=file, sets=chosen)
        preset = preset or _preset_of(file) or DEFAULT_PRESET
        name = f"{store.path.resolve().name}-{preset}-seed{config.seed}"
        run = out or Path("runs") / name
        start(store, config, run)
        for path, value in of_environment(store.header.env, preset).items():
            if flatten(config)[path] == value:
                typer.echo(f"{path} = {value}, as the data are of {store.header.env}")
    with progress(f"pretraining {run.name}", "updates") as report:
        done = go_on(run, report, data=store, track=track)
    _show(done)
    typer.echo(f"picture: {draw_curve(run)}")


def _preset_of(file: Path | None) -> str | None:
    """The one that a file of settings names, which was read before and is right."""
    from m3pc.config import strict_yaml

    tree = None if file is None else strict_yaml.read(file.read_text(encoding="utf-8"))
    return tree.get("preset") if isinstance(tree, dict) else None


def _show(done: "Pretrained") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    found = done.measures
    if found:
        table = Table("on held-out episodes", "found", "beside it", box=SIMPLE_HEAD)
        mean = "1 would be their variance"
        rows = (
            ("error of the next state", "state_1", f"{found['copy_1']:.4f}: copying the present"),
            ("error of the last state", "state_h", f"{found['copy_h']:.4f}: copying the present"),
            ("error of rewards", "reward", mean),
            ("error of returns", "return", mean),
            ("error of actions", "action", f"{found['action_spread']:.4f}: their variance"),
            ("... between states", "action_between", "the same; backward planning asks this"),
            ("... towards a state", "action_towards", "the same; a single mask asks this"),
        )
        for label, name, beside in rows:
            table.add_row(label, f"{found[name]:.4f}", beside)
        for name in ("v", "q"):
            value, together = found[f"{name}_mean"], found[f"{name}_correlation"]
            seen = f"{found['seen_mean']:.1f}: discounted return seen"
            table.add_row(f"{name.upper()}, mean", f"{value:.1f}", f"{seen}, r = {together:.2f}")
        console.print(table)
    else:
        console.print("no episode was held out (dataset.train_share), so nothing was measured")
    console.print(f"run: {done.path}  weights: {done.weights.digest[:16]}")
