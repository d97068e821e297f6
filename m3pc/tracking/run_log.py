"""Metrics of a run: a JSON line and TensorBoard scalars for each report."""

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
    """Appends to RUN/metrics.jsonl. A run that resumes at count `done` deletes later lines."""

    def __init__(
        self,
        folder: Path,
        *,
        done: int,
        unit: Unit = "update",
        vital: bool = True,
        tracker: Tracker | None = None,
    ) -> None:
        """`unit` is what `done` counts: updates of the whole run, or environment steps. If the
        disk is full, a `vital` log raises; any other loses the line. `tracker` gets the same
        numbers and is closed with the log."""
        from torch.utils.tensorboard import SummaryWriter

        path, self._unit, self._vital = folder / NAME, unit, vital
        self._tracker = tracker
        _truncate(path, unit, after=done)
        self.file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder), purge_step=done + 1)

    def write(
        self, group: str, done: int, numbers: Mapping[str, float], **lists: Sequence[float]
    ) -> None:
        """Write one group of metrics after `done` updates or steps. Lists go to the file only."""
        finite: dict[str, Any] = {n: x if math.isfinite(x) else None for n, x in numbers.items()}
        finite |= {name: list(values) for name, values in lists.items()}
        with self._unless_vital():
            self.file.write(json.dumps({self._unit: done, "group": group, **finite}) + "\n")
            self.file.flush()
            for name, value in numbers.items():
                self._board.add_scalar(f"{group}/{name}", value, done)
        if self._tracker is not None:
            self._tracker.log({f"{group}/{name}": x for name, x in numbers.items()}, done)

    def sync(self) -> None:
        """Sync all lines to disk. Call this before a checkpoint, which relies on them."""
        os.fsync(self.file.fileno())
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
            for closing in (self.file, self._board):
                with self._unless_vital():
                    closing.close()
        finally:
            if self._tracker is not None:
                self._tracker.close()

    @contextmanager
    def _unless_vital(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._vital:
                raise
            log.warning("event=metrics-lost reason=%s", error)


def read_metrics(folder: Path, group: str) -> list[dict[str, Any]]:
    """The complete lines of one group, in order."""
    if not (folder / NAME).exists():
        return []
    lines = map(_parsed, (folder / NAME).read_bytes().splitlines())
    return [line for line in lines if line.pop("group", None) == group]


def _truncate(path: Path, unit: Unit, *, after: int) -> None:
    """Delete the first line that is incomplete or counts above `after`, and all later lines."""
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
    """The count of a line; infinite if it is damaged, so that `_truncate` deletes it."""
    fields = _parsed(line)
    try:
        return int(fields[unit]) if "group" in fields else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def _parsed(line: bytes) -> dict[str, Any]:
    """The fields of a line; empty if it is incomplete or damaged."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
