"""A run's metrics where Prometheus finds them, for as long as the run is driven."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from m3pc import __version__
from m3pc.core.token_file import check_token
from m3pc.distributed.prometheus_targets import FOLDER, TargetsFile
from m3pc.telemetry.exporter import LOOPBACK, Exporter
from m3pc.telemetry.recorder import Snapshot
from m3pc.types import InputError

PublishMetrics = Callable[[Snapshot, str], None]  # and what the run lacks to be in order


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsEndpoint:
    """How metrics are served."""

    host: str = LOOPBACK
    port: int | None = None  # None: the first that is free from 9400 on
    targets: Path | None = None  # folder for what Prometheus reads; None: in the run's folder
    token: Path | None = None  # file with what Prometheus has to send; None: it sends nothing


def scraped(where: str) -> MetricsEndpoint | None:
    """HOST:PORT, auto or off. What a machine has for all runs comes from its environment: a folder
    that its Prometheus watches (M3PC_TARGETS), a token file (M3PC_METRICS_TOKEN_FILE)."""
    if where == "off":
        return None
    host, _, port = where.rpartition(":")
    if where == "auto":
        host, port = LOOPBACK, ""
    elif not (host and port.isdecimal() and int(port) < 2**16):
        raise InputError(f"--metrics is {where!r}; give HOST:PORT such as 127.0.0.1:9400, or off")
    targets, token = os.environ.get("M3PC_TARGETS"), os.environ.get("M3PC_METRICS_TOKEN_FILE")
    return MetricsEndpoint(
        host=host.strip("[]"),
        port=int(port) if port else None,
        targets=Path(targets) if targets else None,
        token=Path(token) if token else None,
    )


@contextmanager
def told_metrics(run: Path, scraped: MetricsEndpoint | None) -> Iterator[PublishMetrics]:
    """Yield whom to tell; without `scraped` nobody listens."""
    if scraped is None:
        yield lambda snapshot, lacks: None
        return
    token = check_token(scraped.token).read_text().strip() if scraped.token else None
    info = {"version": __version__, "ray": ray.__version__, "auth": _auth()}
    try:
        exporter = Exporter(scraped.host, scraped.port, info=info, token=token)
    except OSError as error:
        raise InputError(f"{error.strerror}; give another address, or off") from None
    folder = scraped.targets or run / FOLDER
    with exporter, TargetsFile(folder, run.resolve().name, exporter.address):
        yield lambda snapshot, lacks: exporter.update(snapshot, unready=lacks)


def _auth() -> str:
    return "token" if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" else "off"
