"""`m3pc pretrain`: train the trajectory model and the critic on a store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.options import ConfigFile, Preset, RunSeed, Sets, Track, open_store

if TYPE_CHECKING:
    from m3pc.training.pretrain import PretrainResult


def pretrain(
    data: Annotated[
        str | None,
        typer.Option(
            help="Store to learn from: a folder, or shipped:NAME. Not needed with --resume, unless "
            "the store was moved."
        ),
    ] = None,
    preset: Preset = None,
    file: ConfigFile = None,
    sets: Sets = None,
    seed: RunSeed = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/DATA-PRESET-seedN.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the run in this folder; the result is the same bit for bit."),
    ] = None,
    track: Track = "",
) -> None:
    """Train on logged episodes; print the errors on held-out episodes that planning depends on."""
    from m3pc.cli.progress import progress
    from m3pc.config.overrides import flatten
    from m3pc.config.presets import DEFAULT_PRESET, of_environment, resolve
    from m3pc.tracking.trackers import require_tracker
    from m3pc.training.pretrain import create_run, draw_curve
    from m3pc.training.pretrain import resume as train
    from m3pc.types import InputError

    require_tracker(track)
    store = open_store(data) if data is not None else None
    if resume is not None:
        if preset or file or sets or out or seed is not None:
            raise InputError("a resumed run has its settings and its folder; give --resume alone")
        run = resume
    elif store is None:
        raise InputError("there is nothing to learn from; give --data STORE, or --resume RUN")
    else:
        chosen = [*(sets or ()), *([] if seed is None else [f"seed={seed}"])]
        config = resolve(preset=preset, env=store.header.env, file=file, sets=chosen)
        preset = preset or _preset_of(file) or DEFAULT_PRESET
        name = f"{store.path.resolve().name}-{preset}-seed{config.seed}"
        run = out or Path("runs") / name
        create_run(store, config, run)
        for path, value in of_environment(store.header.env, preset).items():
            if flatten(config)[path] == value:
                typer.echo(f"{path} = {value}, as the data are of {store.header.env}")
    with progress(f"pretraining {run.name}", "updates") as report:
        result = train(run, report, data=store, track=track)
    _show(result)
    typer.echo(f"picture: {draw_curve(run)}")


def _preset_of(file: Path | None) -> str | None:
    """The preset that a file of settings names; the file was checked before."""
    from m3pc.config import strict_yaml

    tree = None if file is None else strict_yaml.read(file.read_text(encoding="utf-8"))
    return tree.get("preset") if isinstance(tree, dict) else None


def _show(result: "PretrainResult") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    measures = result.measures
    if measures:
        table = Table("on held-out episodes", "value", "reference", box=SIMPLE_HEAD)
        mean = "1: predicting their mean"
        rows = (
            (
                "error of the next state",
                "state_1",
                f"{measures['copy_1']:.4f}: copying the present",
            ),
            (
                "error of the last state",
                "state_h",
                f"{measures['copy_h']:.4f}: copying the present",
            ),
            ("error of rewards", "reward", mean),
            ("error of returns", "return", mean),
            ("error of actions", "action", f"{measures['action_spread']:.4f}: their variance"),
            ("... between states", "action_between", "the same; matters for backward planning"),
            ("... towards a state", "action_towards", "the same; matters for a single mask"),
        )
        for label, name, reference in rows:
            table.add_row(label, f"{measures[name]:.4f}", reference)
        for name in ("v", "q"):
            value, correlation = measures[f"{name}_mean"], measures[f"{name}_correlation"]
            reference = f"{measures['seen_mean']:.1f}: discounted return, r = {correlation:.2f}"
            table.add_row(f"{name.upper()}, mean", f"{value:.1f}", reference)
        console.print(table)
    else:
        console.print("no episode was held out (dataset.train_share), so nothing was measured")
    console.print(f"run: {result.path}  weights: {result.weights.digest[:16]}")
