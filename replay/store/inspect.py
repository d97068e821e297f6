"""What a store holds, in whatever state it is: being written, closed, left by a crash, damaged.

Only reads. What is whole is there, in a store that is written perhaps an episode that was not yet
acknowledged; what is not whole is named.
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
from replay.format.index import ProducerState, StoreIndex, add_up
from replay.format.log import LogEntry
from replay.format.segment import FOLDER as SEGMENTS
from replay.format.segment import Segment, Tables, columns, live_tables, open_tables, withdrawn
from replay.store.producers import following
from replay.store.recovery import OpenLog, read_log
from replay.store.tail import read_manifest, read_mark
from replay.store.verify import ATTEMPTS, Finding, damage, is_written


class StoreState(StrEnum):
    WRITTEN = "being written"
    CLOSED = "closed in order"
    CRASHED = "left by a crash"
    FINISHED = "finished data set"


class InspectedPart(NamedTuple):
    """A segment, or what the open log holds."""

    tables: Tables
    segment: Segment  # the same as arrays
    withdrawn: NDArray[np.bool_]  # [E] episodes that no learner may see any more


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInspection:
    path: Path
    state: StoreState
    listing: StoreIndex
    parts: Sequence[InspectedPart]  # whatever is whole: segments, then the log
    producers: Mapping[int, ProducerState]  # by slot, with what the log holds
    refused: int  # episodes, with those in the log
    log: str | None  # name of the open log; a finished data set has none
    log_bytes: int
    damaged: Sequence[Finding]  # segments' files and the log
    lost: int  # episodes in damaged segments
    torn: Mapping[str, int]  # bytes at a file's end that a crash left, by its name

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
        """Least and greatest of the policies that acted; None without episodes."""
        segments = [part.segment for part in self.parts]
        if not segments:
            return None
        first = np.concatenate([segment.versions for segment in segments])
        last = np.concatenate([segment.last_versions for segment in segments])
        return int(first.min()), int(max(first.max(), last.max()))


def survey(path: Path, *, fs: FS | None = None, attempts: int = ATTEMPTS) -> StoreInspection:
    """InputError where the manifest itself is damaged or there is none."""
    fs = fs or Disk()
    written = is_written(fs, path)
    mark = read_mark(fs, path)  # first: what it tells is in what is read next
    parsed = read_manifest(fs, path, mark)
    listing = add_up(parsed.events, path / manifest.NAME)
    size = len(parsed.whole + parsed.rest)
    opened = read_log(fs, path, listing, mark) if listing.close is None else None
    name = f"{logs.FOLDER}/{logs.file_name(listing.rolls)}" if opened else None
    sealed, damaged, lost = _segments(fs, path, listing)
    if opened and opened.wrong:
        damaged.append(Finding(path / str(name), opened.wrong))
    if damaged and attempts > 1 and len(manifest.read(fs, path)) != size:
        # The writer was faster: files went after the manifest told so.
        return survey(path, fs=fs, attempts=attempts - 1)
    entries = opened.entries if opened else []
    torn = {}
    if opened and name and not written and not opened.wrong:
        ends = {manifest.NAME: len(parsed.rest), name: len(opened.content) - opened.end}
        torn = {file: count for file, count in ends.items() if count}
    tables = sealed + _in_log(entries, listing)
    return StoreInspection(
        path=path,
        state=_state(opened, written),
        listing=listing,
        parts=[_part(found, listing) for found in tables],
        producers={**listing.producers, **{e.key.slot: following(e.key) for e in entries}},
        refused=listing.refused + sum(entry.episode is None for entry in entries),
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


def _segments(fs: FS, path: Path, listing: StoreIndex) -> tuple[list[Tables], list[Finding], int]:
    """What is whole, what is wrong with the others' files, and how many episodes those held."""
    sealed: list[Tables] = []
    damaged: list[Finding] = []
    lost = 0
    for listed in listing.segments:
        try:
            sealed.append(open_tables(fs, path / SEGMENTS, listed, listing.header))
        except InputError as error:
            lost += listed.episodes.rows
            files = list(damage(fs, path, listed))
            damaged += files or [Finding(path / SEGMENTS / listed.steps.name, str(error))]
    return sealed, damaged, lost


def _in_log(entries: Sequence[LogEntry], listing: StoreIndex) -> list[Tables]:
    kept = [(entry.key, entry.episode) for entry in entries if entry.episode is not None]
    return [live_tables(kept, listing)] if kept else []


def _part(tables: Tables, listing: StoreIndex) -> InspectedPart:
    segment = columns(tables)
    return InspectedPart(tables, segment, withdrawn(segment, listing.withdrawn))
