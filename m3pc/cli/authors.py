"""`m3pc import-authors` and `m3pc verify`: the authors' weights, and their recorded outputs."""

from pathlib import Path
from typing import Annotated

import typer

from m3pc.cli.data import EnvId, MemoryLimit, TimeLimit


def import_authors(
    model: Annotated[Path, typer.Argument(help="The authors' checkpoint, a .pt with {model}.")],
    out: Annotated[Path, typer.Argument(help="Where the checkpoint goes; must not exist yet.")],
    *,
    critic: Annotated[Path, typer.Option(help="Their critic, a .pt with {q, q_target, v}.")],
    stats: Annotated[
        Path,
        typer.Option(help="A .npz: mean_states, ..., std_returns; the critic's if it has other."),
    ],
    heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads, if stats has no config; default 4.")
    ] = None,
    env: EnvId = None,
    horizon: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="The environment's step limit.")
    ] = 1000,
    memory_limit: MemoryLimit = 8.0,
    time_limit: TimeLimit = 600.0,
) -> None:
    """Turn the authors' network, critic and statistics into a checkpoint of preset parity."""
    from m3pc.datasets.sandbox import SandboxLimits
    from m3pc.interop.released_weights import STAND_IN, Files
    from m3pc.interop.released_weights import import_authors as run

    limits = SandboxLimits(memory=int(memory_limit * 2**30), seconds=time_limit)
    files = Files(model=model, critic=critic, stats=stats)
    imported = run(files, out, heads=heads, env=env, max_episode_steps=horizon, limits=limits)
    weights, sizes = imported.weights, imported.weights.config.model
    typer.echo(
        f"{out}: states of {weights.state_size}, actions of {weights.action_size}, "
        f"width {sizes.width}, {sizes.heads} heads, "
        f"{sizes.encoder_layers} + {sizes.decoder_layers} layers, window {sizes.window}, "
        f"{weights.version:,} updates, digest {weights.digest[:16]}"
    )
    if imported.guessed:
        typer.echo(
            f"{stats} has no {' and no '.join(imported.guessed)}: the mean of the returns and "
            f"{STAND_IN:g} standard deviations stand in, also for the return that is asked for"
        )
    if imported.shared_scales:
        typer.echo(
            f"{stats} has no critic_mean_states and critic_std_states: the model's stand in. The "
            "authors' critic saw unpadded statistics; without them q and q0 score other states"
        )


def verify(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run.")],
    golden: Annotated[Path, typer.Argument(help="A .npz of inputs and the authors' outputs.")],
) -> None:
    """Compare a checkpoint's answers with recorded ones, line by line; exit 1 if any misses."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from m3pc.interop.verify_released import verify as run

    items = run(checkpoint, golden)
    table = Table("item", "largest error", "tolerance", "", box=None)
    for item in items:
        verdict = "[green]ok" if item.ok else "[bold red]MISS"
        table.add_row(escape(item.name), f"{item.error:.2g}", f"{item.tolerance:g}", verdict)
    Console(highlight=False).print(table)
    missed = sum(not item.ok for item in items)
    typer.echo(f"{len(items) - missed} of {len(items)} items are within their tolerance")
    raise typer.Exit(int(missed > 0))
