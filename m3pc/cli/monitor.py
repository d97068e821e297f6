"""`m3pc monitor`: Prometheus, and Grafana where it is installed, for online runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from m3pc.cli.options import RunPaths

FirstRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="The first of the runs that were given to `up`.")
]

app = typer.Typer(help="Watch online runs in Prometheus and Grafana.", no_args_is_help=True)


@app.command()
def up(
    runs: RunPaths,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Prometheus.")] = 9090,
    grafana_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Grafana.")] = 3000,
) -> None:
    """Start Prometheus and Grafana for runs on this machine, which may start later."""
    from m3pc.monitoring.services import start_services
    from m3pc.online.run_control import read_status

    for run in runs:
        read_status(run)  # refuses folders that are not of a run
    services = start_services(
        _folder(runs[0]),
        [_targets(run) for run in runs],
        port=port,
        grafana_port=grafana_port,
    )
    for service in services:
        typer.echo(f"{service.name}: {service.url or 'runs'}")
    if not any(service.name == "grafana" for service in services):
        typer.echo(f"grafana: not installed; m3pc monitor page {runs[0]} draws the same dashboards")
    typer.echo(f"m3pc monitor down {runs[0]} stops them")


@app.command()
def down(run: FirstRun) -> None:
    """Stop what `up` started. The measurements stay in RUN/monitor."""
    from m3pc.monitoring.services import stop_services

    services = stop_services(_folder(run))
    names = ", ".join(service.name for service in services)
    typer.echo(f"ended: {names or 'nothing was running'}")


@app.command()
def page(
    run: FirstRun,
    out: Annotated[
        Path | None, typer.Option(help="File of the page. Default: RUN/monitor/boards.html.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Show the last minutes only. Default: the complete run."),
    ] = None,
) -> None:
    """Draw all dashboards as one HTML page, without Grafana."""
    from m3pc.monitoring.page import write_page
    from m3pc.monitoring.services import running_services, shipped_folder
    from m3pc.types import InputError

    services = running_services(_folder(run))
    prometheus = next((s for s in services if s.name == "prometheus"), None)
    if prometheus is None:
        raise InputError(f"no Prometheus watches {run}; start it with m3pc monitor up {run}")
    path = out or _folder(run) / "boards.html"
    panels = write_page(
        path,
        prometheus=prometheus.url.removesuffix("/alerts"),
        dashboards=shipped_folder(),
        run=run.resolve().name,
        seconds=None if minutes is None else 60 * minutes,
    )
    typer.echo(f"page: {path}  panels with data: {panels}")


@app.command()
def metrics() -> None:
    """Print the table of all metrics, as in docs/METRICS.md."""
    from m3pc.monitoring.metrics_reference import metrics_table

    typer.echo(metrics_table(), nl=False)


def _folder(run: Path) -> Path:
    return run / "monitor"


def _targets(run: Path) -> Path:
    from m3pc.distributed.prometheus_targets import FOLDER

    folder = os.environ.get("M3PC_TARGETS")
    return Path(folder) if folder else run / FOLDER
