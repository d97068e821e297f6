"""`m3pc import-authors` and `m3pc verify`: the paper's released weights, and their check."""

from pathlib import Path
from typing import Annotated

import typer

from m3pc.cli.options import EnvId, MemoryLimit, TimeLimit, sandbox_limits


def import_authors(
    model: Annotated[Path, typer.Argument(help="The released model: a .pt file with {model}.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new checkpoint; must not exist yet.")],
    *,
    critic: Annotated[
        Path, typer.Option(help="The released critic: a .pt file with {q, q_target, v}.")
    ],
    stats: Annotated[
        Path,
        typer.Option(
            help="Statistics of the training data: a .npz with mean_states, ..., std_returns, and "
            "critic_mean_states, critic_std_states if the critic's differ."
        ),
    ],
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="Attention heads. Default: as --stats says, else 4."),
    ] = None,
    env: EnvId = None,
    horizon: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Step limit of the environment.")
    ] = 1000,
    memory_limit: MemoryLimit = 8.0,
    time_limit: TimeLimit = 600.0,
) -> None:
    """Convert the paper's released network, critic and statistics into a checkpoint."""
    from m3pc.interop.released_files import ReleasedPaths
    from m3pc.interop.released_weights import STAND_IN
    from m3pc.interop.released_weights import import_released as run

    limits = sandbox_limits(memory_limit, time_limit)
    files = ReleasedPaths(model=model, critic=critic, stats=stats)
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
            f"{STAND_IN:g} standard deviations are used instead, also for the target return"
        )
    if imported.shared_scales:
        typer.echo(
            f"{stats} has no critic_mean_states and critic_std_states: the model's are used. The "
            "authors' critic was trained with unpadded statistics; without them q and q0 score "
            "other states"
        )


def verify(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a run or of a checkpoint.")],
    golden: Annotated[
        Path, typer.Argument(help="A .npz of inputs and of the authors' recorded outputs.")
    ],
) -> None:
    """Compare a checkpoint's outputs with recorded ones; exit code 1 if any differs too much."""
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
    misses = sum(not item.ok for item in items)
    typer.echo(f"{len(items) - misses} of {len(items)} items are within their tolerance")
    raise typer.Exit(int(misses > 0))
