"""`m3pc finetune`: let a pretrained model improve by what it collects."""

from pathlib import Path
from typing import Annotated

import typer

from m3pc.cli.track import TrackOption

AddressOption = Annotated[
    str | None,
    typer.Option(
        help="Of a Ray cluster: auto, HOST:PORT, ray://HOST:PORT. Default: a private one."
    ),
]
CoordinatorOption = Annotated[
    str,
    typer.Option(
        "--coordinator",
        envvar="M3PC_COORDINATOR",
        help="redis://HOST:PORT, with a password in the variable only; default: a file in the run.",
    ),
]
MetricsOption = Annotated[
    str,
    typer.Option(
        envvar="M3PC_METRICS",
        help="Where Prometheus finds them: HOST:PORT, off, or auto: loopback, from port 9400 on.",
    ),
]
LocalOption = Annotated[
    bool, typer.Option("--local", help="One process, in lock-step; resumes bit for bit.")
]


def finetune(
    source: Annotated[Path, typer.Argument(metavar="CKPT", help="A pretrained run or checkpoint.")],
    data: Annotated[str, typer.Option(help="The store that it learned from, or shipped:NAME.")],
    env: Annotated[str | None, typer.Option(help="Default: where the data came from.")] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="Environment steps in all.")] = None,
    actors: Annotated[int | None, typer.Option(min=1, help="Rollout processes.")] = None,
    envs_per_actor: Annotated[int | None, typer.Option(min=1, help="Environments in each.")] = None,
    planner: Annotated[str | None, typer.Option(help="Explore with rcbc, m, q or q0.")] = None,
    address: AddressOption = None,
    coordinator: CoordinatorOption = "",
    metrics: MetricsOption = "auto",
    track: TrackOption = "",
    local: LocalOption = False,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set one field. May be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same as --set seed=N.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
) -> None:
    """Collect, learn and plan again with what was learned."""
    from m3pc.cli.data import open_store
    from m3pc.config.overrides import override
    from m3pc.core.env_ids import refuse_strangers
    from m3pc.model import checkpoint
    from m3pc.online.run_folder import start
    from m3pc.tracking.trackers import require
    from m3pc.types import InputError

    if local and actors is not None:
        raise InputError("--local is one process without actors; drop --local or --actors")
    _require_one_place(local, address)
    require(track)
    found = checkpoint.read(source)
    given = {
        "online.steps": steps,
        "fleet.actors": actors,
        "fleet.envs_per_actor": envs_per_actor,
        "planner.mode": planner,
        "seed": seed,
    }
    chosen = [*(sets or ()), *(f"{path}={x}" for path, x in given.items() if x is not None)]
    config = override(found.weights.config, chosen)
    env_id = env or found.weights.env
    if env_id is None:
        raise InputError(f"{source} does not say which environment it is for; give --env")
    if env is None:
        refuse_strangers(env_id, source)
    run = out or Path("runs") / f"{source.resolve().name}-online-seed{config.seed}"
    start(found, open_store(data), env_id, config, run)
    _go_on(run, local=local, address=address, coordinator=coordinator, metrics=metrics, track=track)


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an online run.")],
    address: AddressOption = None,
    coordinator: CoordinatorOption = "",
    metrics: MetricsOption = "auto",
    track: TrackOption = "",
    local: LocalOption = False,
) -> None:
    """Go on with a run that was stopped or killed, on a new cluster if need be."""
    _require_one_place(local, address)
    _go_on(run, local=local, address=address, coordinator=coordinator, metrics=metrics, track=track)


def _require_one_place(local: bool, address: str | None) -> None:
    from m3pc.types import InputError

    if local and address is not None:
        raise InputError(f"--local is one process without Ray; drop it, or --address {address}")


def _go_on(
    run: Path, *, local: bool, address: str | None, coordinator: str, metrics: str, track: str
) -> None:
    if local:
        from m3pc.cli.progress import progress
        from m3pc.online.local import run_local

        with progress(f"finetuning {run.name}", "steps") as report:
            done = run_local(run, report, track=track)
        typer.echo(f"run: {run}  steps: {done.steps:,}  weights: {done.weights.digest[:16]}")
        return
    from m3pc.cli.live import live
    from m3pc.ray_nodes.connection import prepare

    prepare(address)
    from m3pc.distributed.driver import run_cluster
    from m3pc.distributed.metrics_endpoint import scraped

    where = scraped(metrics)
    with live(f"finetuning {run.name}") as show:
        ended = run_cluster(
            run, show, address=address, coordinator=coordinator, metrics=where, track=track
        )
    typer.echo(f"run: {run}  steps: {ended.steps:,}  {ended.reason}")
    raise typer.Exit(ended.code)
