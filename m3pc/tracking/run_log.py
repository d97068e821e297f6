"""Metrics of a run: a JSON line and TensorBoard scalars for every report."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from m3pc.tracking.trackers import Tracker

NAME = "metrics.jsonl"
Unit = Literal["update", "step"]

log = logging.getLogger(__name__)


class RunLog:
    """Appends to RUN/metrics.jsonl. A run that goes back to count n forgets what came after it."""

    def __init__(
        self,
        folder: Path,
        *,
        done: int,
        unit: Unit = "update",
        vital: bool = True,
        tracker: Tracker | None = None,
    ) -> None:
        """`unit` is what is counted: updates of the whole run, or steps in the environment. A log
        that is not `vital` loses what a full disk does not take, and its run goes on. A tracker is
        told the same numbers and closed with the log."""
        from torch.utils.tensorboard import SummaryWriter

        path, self._unit, self._vital = folder / NAME, unit, vital
        self._tracker = tracker
        _forget(path, unit, after=done)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder), purge_step=done + 1)

    def write(
        self, group: str, done: int, numbers: Mapping[str, float], **lists: Sequence[float]
    ) -> None:
        """Numbers of one group of metrics after `done` updates or steps. Lists of numbers are kept
        in the file only."""
        finite: dict[str, Any] = {n: x if math.isfinite(x) else None for n, x in numbers.items()}
        finite |= {name: list(values) for name, values in lists.items()}
        with self._spared():
            self._file.write(json.dumps({self._unit: done, "group": group, **finite}) + "\n")
            self._file.flush()
            for name, value in numbers.items():
                self._board.add_scalar(f"{group}/{name}", value, done)
        if self._tracker is not None:
            self._tracker.log({f"{group}/{name}": x for name, x in numbers.items()}, done)

    def sync(self) -> None:
        """Before a checkpoint: what it stands on is on disk."""
        os.fsync(self._file.fileno())
        self._board.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for closing in (self._file, self._board):
                with self._spared():
                    closing.close()
        finally:
            if self._tracker is not None:
                self._tracker.close()

    @contextmanager
    def _spared(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._vital:
                raise
            log.warning("event=metrics-lost reason=%s", error)


def read(folder: Path, group: str) -> list[dict[str, Any]]:
    """The whole lines of one group, in order."""
    if not (folder / NAME).exists():
        return []
    lines = map(_whole, (folder / NAME).read_bytes().splitlines())
    return [line for line in lines if line.pop("group", None) == group]


def _forget(path: Path, unit: Unit, *, after: int) -> None:
    """Cut the file after its last whole line of a count up to `after`."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n") or _count(line, unit) > after:
                break
            end += len(line)
        file.truncate(end)


def _count(line: bytes, unit: Unit) -> float:
    """Of a line; of one that a power cut spoilt, later than any."""
    found = _whole(line)
    try:
        return int(found[unit]) if "group" in found else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def _whole(line: bytes) -> dict[str, Any]:
    """What a line says; nothing where it was cut or spoilt."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
