"""Serves a run's metrics to Prometheus while the run is driven."""

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

PublishMetrics = Callable[[Snapshot, str], None]  # metrics; why the run is not ready, or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsEndpoint:
    """Where metrics are served, and how Prometheus finds and reads them."""

    host: str = LOOPBACK
    port: int | None = None  # None: the first free one from 9400 on
    targets: Path | None = None  # folder for Prometheus's target files; None: in the run's folder
    token: Path | None = None  # file with the token that Prometheus has to send; None: no token


def parse_metrics_endpoint(address: str) -> MetricsEndpoint | None:
    """Parse HOST:PORT, auto or off (None). M3PC_TARGETS names the folder that this machine's
    Prometheus watches, M3PC_METRICS_TOKEN_FILE a token file."""
    if address == "off":
        return None
    host, _, port = address.rpartition(":")
    if address == "auto":
        host, port = LOOPBACK, ""
    elif not (host and port.isdecimal() and int(port) < 2**16):
        raise InputError(f"--metrics is {address!r}; give HOST:PORT such as 127.0.0.1:9400, or off")
    targets, token = os.environ.get("M3PC_TARGETS"), os.environ.get("M3PC_METRICS_TOKEN_FILE")
    return MetricsEndpoint(
        host=host.strip("[]"),
        port=int(port) if port else None,
        targets=Path(targets) if targets else None,
        token=Path(token) if token else None,
    )


@contextmanager
def published_metrics(run: Path, endpoint: MetricsEndpoint | None) -> Iterator[PublishMetrics]:
    """Yield a callback that publishes metrics; a no-op when serving is off (`endpoint` is None)."""
    if endpoint is None:
        yield lambda snapshot, missing: None
        return
    token = check_token(endpoint.token).read_text().strip() if endpoint.token else None
    info = {"version": __version__, "ray": ray.__version__, "auth": _auth()}
    try:
        exporter = Exporter(endpoint.host, endpoint.port, info=info, token=token)
    except OSError as error:
        raise InputError(f"{error.strerror}; give another address, or off") from None
    folder = endpoint.targets or run / FOLDER
    with exporter, TargetsFile(folder, run.resolve().name, exporter.address):
        yield lambda snapshot, missing: exporter.update(snapshot, unready=missing)


def _auth() -> str:
    return "token" if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" else "off"
