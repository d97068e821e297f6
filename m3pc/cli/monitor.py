"""`m3pc monitor`: a Prometheus, and a Grafana where there is one, that watch runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of online runs.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The first of those given to `up`.")]

app = typer.Typer(help="Watch runs in Prometheus and Grafana.", no_args_is_help=True)


@app.command()
def up(
    runs: Runs,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of Prometheus.")] = 9090,
    grafana_port: Annotated[int, typer.Option(min=1, max=65535, help="Of Grafana.")] = 3000,
) -> None:
    """Start them for runs on this machine, whether those run already or later."""
    from m3pc.monitoring.services import up as start
    from m3pc.online.run_control import read_status

    for run in runs:
        read_status(run)  # refuses what is no folder of a run
    services = start(
        _folder(runs[0]),
        [_targets(run) for run in runs],
        port=port,
        grafana_port=grafana_port,
    )
    for service in services:
        typer.echo(f"{service.name}: {service.url or 'runs'}")
    if not any(service.name == "grafana" for service in services):
        typer.echo(f"grafana: not installed; m3pc monitor page {runs[0]} draws the same dashboards")
    typer.echo(f"m3pc monitor down {runs[0]} ends them")


@app.command()
def down(run: Run) -> None:
    """End what `up` started. What was measured stays in RUN/monitor."""
    from m3pc.monitoring.services import down as end

    found = end(_folder(run))
    typer.echo(f"ended: {', '.join(service.name for service in found) or 'nothing was running'}")


@app.command()
def page(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="Default: RUN/monitor/boards.html.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="The last ones. Default: all of the run.")
    ] = None,
) -> None:
    """Draw all dashboards as one page, without Grafana."""
    from m3pc.monitoring.page import write_page
    from m3pc.monitoring.services import shipped, standing
    from m3pc.types import InputError

    found = [service for service in standing(_folder(run)) if service.name == "prometheus"]
    if not found:
        raise InputError(f"no Prometheus watches {run}; start it with m3pc monitor up {run}")
    path = out or _folder(run) / "boards.html"
    panels = write_page(
        path,
        prometheus=found[0].url.removesuffix("/alerts"),
        boards=shipped(),
        run=run.resolve().name,
        seconds=None if minutes is None else 60 * minutes,
    )
    typer.echo(f"page: {path}  panels with data: {panels}")


@app.command()
def metrics() -> None:
    """All metrics, as docs/METRICS.md has them."""
    from m3pc.monitoring.metrics_reference import metrics_table

    typer.echo(metrics_table(), nl=False)


def _folder(run: Path) -> Path:
    return run / "monitor"


def _targets(run: Path) -> Path:
    from m3pc.distributed.prometheus_targets import FOLDER

    given = os.environ.get("M3PC_TARGETS")
    return Path(given) if given else run / FOLDER
