"""Inspects a store in any state: being written, closed, left by a crash, damaged. Only reads.

The result holds everything intact and names everything damaged. If the store is being written, the
result may include episodes that are not acknowledged yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from m3pc.types import InputError
from replay.format import log as logs
from replay.format import manifest
from replay.format.fs import FS, Disk
from replay.format.index import ProducerState, StoreIndex, index_of
from replay.format.segment import FOLDER as SEGMENTS
from replay.format.segment import (
    Segment,
    Tables,
    arrays_of,
    live_tables,
    open_tables,
    withdrawn_mask,
)
from replay.store.producers import state_after
from replay.store.recovery import OpenLog, read_log
from replay.store.tail import read_manifest, read_mark
from replay.store.verify import ATTEMPTS, Finding, damaged_files, is_written


class StoreState(StrEnum):
    WRITTEN = "being written"
    CLOSED = "closed in order"
    CRASHED = "left by a crash"
    FINISHED = "finished data set"


class InspectedPart(NamedTuple):
    """A segment, or the episodes of the open log."""

    tables: Tables
    segment: Segment  # the same as arrays
    withdrawn: NDArray[np.bool_]  # [E] episodes that are never sampled again


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInspection:
    path: Path
    state: StoreState
    index: StoreIndex
    parts: Sequence[InspectedPart]  # the intact ones: segments, then the log
    producers: Mapping[int, ProducerState]  # keyed by slot, including the log
    refused: int  # invalid episodes, including the log
    log: str | None  # name of the open log; None in a finished data set
    log_bytes: int
    damaged: Sequence[Finding]  # files of segments, and the log
    lost: int  # episodes in damaged segments
    torn: Mapping[str, int]  # bytes of incomplete entries left by a crash, by file name

    @property
    def episodes(self) -> int:
        return sum(part.tables.episodes.num_rows for part in self.parts)

    @property
    def steps(self) -> int:
        return sum(part.tables.steps.num_rows for part in self.parts)

    @property
    def withdrawn(self) -> int:
        return sum(int(part.withdrawn.sum()) for part in self.parts)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Smallest and largest version of the policies that acted; None without episodes."""
        segments = [part.segment for part in self.parts]
        if not segments:
            return None
        first = np.concatenate([segment.versions for segment in segments])
        last = np.concatenate([segment.last_versions for segment in segments])
        return int(first.min()), int(max(first.max(), last.max()))


def inspect_store(path: Path, *, fs: FS | None = None, attempts: int = ATTEMPTS) -> StoreInspection:
    """InputError: the manifest itself is damaged or missing."""
    fs = fs or Disk()
    written = is_written(fs, path)
    mark = read_mark(fs, path)  # read first: all else is at least as new
    parsed = read_manifest(fs, path, mark)
    index = index_of(parsed.events, path / manifest.NAME)
    size = len(parsed.complete + parsed.rest)
    opened = read_log(fs, path, index, mark) if index.close is None else None
    name = f"{logs.FOLDER}/{logs.file_name(index.rolls)}" if opened else None
    sealed, damaged, lost = _segments(fs, path, index)
    if opened and opened.damage:
        damaged.append(Finding(path / str(name), opened.damage))
    if damaged and attempts > 1 and len(manifest.read(fs, path)) != size:
        # The manifest grew: the writer may have removed files meanwhile, so read again.
        return inspect_store(path, fs=fs, attempts=attempts - 1)
    entries = opened.entries if opened else []
    torn = {}
    if opened and name and not written and not opened.damage:
        ends = {manifest.NAME: len(parsed.rest), name: len(opened.content) - opened.end}
        torn = {file: count for file, count in ends.items() if count}
    logged = [(entry.key, entry.episode) for entry in entries if entry.episode is not None]
    tables = [*sealed, live_tables(logged, index)] if logged else sealed
    segments = [arrays_of(batches) for batches in tables]
    marks = [withdrawn_mask(segment, index.withdrawn) for segment in segments]
    return StoreInspection(
        path=path,
        state=_state(opened, written),
        index=index,
        parts=list(map(InspectedPart, tables, segments, marks)),
        producers={**index.producers, **{e.key.slot: state_after(e.key) for e in entries}},
        refused=index.refused + sum(entry.episode is None for entry in entries),
        log=name,
        log_bytes=len(opened.content) if opened else 0,
        damaged=damaged,
        lost=lost,
        torn=torn,
    )


def _state(opened: OpenLog | None, written: bool) -> StoreState:
    if opened is None:
        return StoreState.FINISHED
    if written:
        return StoreState.WRITTEN
    return StoreState.CLOSED if opened.closed else StoreState.CRASHED


def _segments(fs: FS, path: Path, index: StoreIndex) -> tuple[list[Tables], list[Finding], int]:
    """Return the intact segments, findings in damaged ones, and how many episodes these held."""
    sealed: list[Tables] = []
    damaged: list[Finding] = []
    lost = 0
    for entry in index.segments:
        try:
            sealed.append(open_tables(fs, path / SEGMENTS, entry, index.header))
        except InputError as error:
            lost += entry.episodes.rows
            files = list(damaged_files(fs, path, entry))
            damaged += files or [Finding(path / SEGMENTS / entry.steps.name, str(error))]
    return sealed, damaged, lost
