"""Writes the addresses of a run's metrics into files for Prometheus's file service discovery.

FOLDER/NAME.m3pc.json    the run's own address
FOLDER/NAME.ray.json     Ray's addresses, one per node
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import ray

from m3pc.core.files import replace_file

FOLDER = "targets"  # in the run's folder, unless another folder is configured
POLL_SECONDS = 10.0  # between two queries of Ray's nodes
STOP_SECONDS = 5.0

log = logging.getLogger(__name__)


def ray_addresses() -> list[str]:
    """Metrics addresses of the nodes that are alive."""
    nodes: list[dict[str, Any]] = cast(Any, ray).nodes()
    alive = [node for node in nodes if node["Alive"] and node["MetricsExportPort"]]
    return sorted(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in alive)


class TargetsFile:
    """Keeps a run's target files up to date and removes them on exit. A thread queries Ray's
    nodes, since Ray may answer slowly."""

    def __init__(
        self,
        folder: Path,
        run: str,
        address: str,
        *,
        nodes: Callable[[], Sequence[str]] = ray_addresses,
        poll_seconds: float = POLL_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run, self._nodes = run, nodes
        self._poll_seconds, self._stop_seconds = poll_seconds, stop_seconds
        self._files = [folder / f"{run}.{job}.json" for job in ("m3pc", "ray")]
        _write(self._files[0], [address], job="m3pc", run=run)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="targets", daemon=True)
        self._thread.start()

    def __enter__(self) -> "TargetsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._stop_seconds)
        for file in self._files:
            file.unlink(missing_ok=True)

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                addresses = list(self._nodes())
                if not self._stop.is_set():
                    _write(self._files[1], addresses, job="ray", run=self._run)
            except Exception as error:  # Ray's head is away, or the disk is full: try again
                log.warning("event=targets-unknown reason=%s", error)
            self._stop.wait(self._poll_seconds)


def _write(path: Path, addresses: Sequence[str], **labels: str) -> None:
    """Write atomically: Prometheus may read at any moment."""
    replace_file(path, json.dumps([{"targets": list(addresses), "labels": labels}]).encode())
