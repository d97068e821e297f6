"""Where a run's metrics are, in files that Prometheus reads (file service discovery).

FOLDER/NAME.m3pc.json    the run's own
FOLDER/NAME.ray.json     those of Ray, one for each node
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import ray

from m3pc.core.files import replace_file

FOLDER = "targets"  # in the run's folder, where no other is given
EVERY = 10.0  # seconds between two looks at Ray's nodes
STOP_SECONDS = 5.0

log = logging.getLogger(__name__)


def ray_addresses() -> list[str]:
    """Of the metrics of the nodes that are alive."""
    nodes: list[dict[str, Any]] = cast(Any, ray).nodes()
    alive = [node for node in nodes if node["Alive"] and node["MetricsExportPort"]]
    return sorted(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in alive)


class TargetsFile:
    """There while a run is; a thread follows Ray's nodes, which it may take long to hear of."""

    def __init__(
        self,
        folder: Path,
        run: str,
        address: str,
        *,
        nodes: Callable[[], Sequence[str]] = ray_addresses,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run, self._nodes = run, nodes
        self._files = [folder / f"{run}.{job}.json" for job in ("m3pc", "ray")]
        _write(self._files[0], [address], job="m3pc", run=run)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="targets", daemon=True)
        self._thread.start()

    def __enter__(self) -> "TargetsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(STOP_SECONDS)
        for file in self._files:
            file.unlink(missing_ok=True)

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                found = list(self._nodes())
                if not self._stop.is_set():
                    _write(self._files[1], found, job="ray", run=self._run)
            except Exception as error:  # Ray's head is away, or the disk full: look again later
                log.warning("event=targets-unknown reason=%s", error)
            self._stop.wait(EVERY)


def _write(path: Path, addresses: Sequence[str], **labels: str) -> None:
    """Whole or not at all: Prometheus may read at any moment."""
    replace_file(path, json.dumps([{"targets": list(addresses), "labels": labels}]).encode())
