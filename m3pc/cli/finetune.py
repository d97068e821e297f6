"""`m3pc finetune` and `m3pc resume`: online runs, which improve a pretrained model."""

from pathlib import Path
from typing import Annotated

import typer

from m3pc.cli.options import RunPath, RunSeed, Sets, Track, open_store

AddressOption = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to use: auto, HOST:PORT or ray://HOST:PORT. Default: start a private one."
    ),
]
CoordinatorOption = Annotated[
    str,
    typer.Option(
        "--coordinator",
        envvar="M3PC_COORDINATOR",
        help="Where processes find each other: redis://HOST:PORT (give a password only in the "
        "environment variable). Default: a file in the run's folder.",
    ),
]
MetricsOption = Annotated[
    str,
    typer.Option(
        envvar="M3PC_METRICS",
        help="Address at which Prometheus reads metrics: HOST:PORT, off, or auto for the first "
        "free port from 9400 on, on this machine only.",
    ),
]
LocalOption = Annotated[
    bool,
    typer.Option(
        "--local", help="Run everything in one process, without Ray; can be resumed bit for bit."
    ),
]


def finetune(
    source: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="Folder of a pretrained run or of a checkpoint."),
    ],
    data: Annotated[
        str, typer.Option(help="Store that CKPT was trained on: a folder, or shipped:NAME.")
    ],
    env: Annotated[
        str | None, typer.Option(help="Environment id. Default: that of the training data.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=0, help="Environment steps to collect. Default: online.steps of CKPT."),
    ] = None,
    actors: Annotated[
        int | None, typer.Option(min=1, help="Rollout processes. Default: fleet.actors of CKPT.")
    ] = None,
    envs_per_actor: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Environments per rollout process. Default: fleet.envs_per_actor of CKPT.",
        ),
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(
            help="Planner that explores: rcbc, m, q or q0. Default: planner.mode of CKPT."
        ),
    ] = None,
    address: AddressOption = None,
    coordinator: CoordinatorOption = "",
    metrics: MetricsOption = "auto",
    track: Track = "",
    local: LocalOption = False,
    sets: Sets = None,
    seed: RunSeed = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the new run. Default: runs/NAME-online-seedN."),
    ] = None,
) -> None:
    """Improve a pretrained model online: collect episodes, learn from them, repeat."""
    from m3pc.config.overrides import override
    from m3pc.core.env_ids import refuse_foreign_code
    from m3pc.model import checkpoint
    from m3pc.online.run_folder import create_run
    from m3pc.tracking.trackers import require_tracker
    from m3pc.types import InputError

    if local and actors is not None:
        raise InputError("--local is one process without actors; drop --local or --actors")
    _refuse_address(local, address)
    require_tracker(track)
    pretrained = checkpoint.read(source)
    options = {
        "online.steps": steps,
        "fleet.actors": actors,
        "fleet.envs_per_actor": envs_per_actor,
        "planner.mode": planner,
        "seed": seed,
    }
    chosen = [*(sets or ()), *(f"{path}={x}" for path, x in options.items() if x is not None)]
    config = override(pretrained.weights.config, chosen)
    env_id = env or pretrained.weights.env
    if env_id is None:
        raise InputError(f"{source} does not say which environment it is for; give --env")
    if env is None:
        refuse_foreign_code(env_id, source)
    run = out or Path("runs") / f"{source.resolve().name}-online-seed{config.seed}"
    create_run(pretrained, open_store(data), env_id, config, run)
    _run(run, local=local, address=address, coordinator=coordinator, metrics=metrics, track=track)


def resume(
    run: RunPath,
    address: AddressOption = None,
    coordinator: CoordinatorOption = "",
    metrics: MetricsOption = "auto",
    track: Track = "",
    local: LocalOption = False,
) -> None:
    """Continue an online run that was stopped or killed, on the same or another cluster."""
    _refuse_address(local, address)
    _run(run, local=local, address=address, coordinator=coordinator, metrics=metrics, track=track)


def _refuse_address(local: bool, address: str | None) -> None:
    from m3pc.types import InputError

    if local and address is not None:
        raise InputError(f"--local is one process without Ray; drop it, or --address {address}")


def _run(
    run: Path, *, local: bool, address: str | None, coordinator: str, metrics: str, track: str
) -> None:
    if local:
        from m3pc.cli.progress import progress
        from m3pc.online.local import run_local

        with progress(f"finetuning {run.name}", "steps") as report:
            result = run_local(run, report, track=track)
        typer.echo(f"run: {run}  steps: {result.steps:,}  weights: {result.weights.digest[:16]}")
        return
    from m3pc.cli.live import live
    from m3pc.ray_nodes.connection import prepare_environment

    prepare_environment(address)
    from m3pc.distributed.launch import run_cluster
    from m3pc.distributed.metrics_endpoint import parse_metrics_endpoint

    endpoint = parse_metrics_endpoint(metrics)
    with live(f"finetuning {run.name}") as show:
        outcome = run_cluster(
            run, show, address=address, coordinator=coordinator, metrics=endpoint, track=track
        )
    typer.echo(f"run: {run}  steps: {outcome.steps:,}  {outcome.reason}")
    raise typer.Exit(outcome.code)
