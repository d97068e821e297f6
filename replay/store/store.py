"""Episodes on disk: checked at every opening, read through the page cache.

    STORE/MANIFEST                        what exists; nothing else counts
    STORE/segments/000000.steps.arrow     one row per step
    STORE/segments/000000.episodes.arrow  one row per episode
    STORE/log/000001.log                  the newest episodes of a live store
    STORE/MARK                            how far the log may be read
    STORE/quarantine/                     damaged files, set aside

R rows of steps, E episodes, S state, A action.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from m3pc.core.files import durable_file, sha256, staged_directory
from m3pc.types import AppendKey, Episode, InputError, Integers
from replay.format import manifest
from replay.format.fs import FS, Disk
from replay.format.index import ProducerState, SegmentEntry, StoreIndex, index_of
from replay.format.manifest import Close, FileEntry, Header, Seal
from replay.format.schema import episodes_batch, episodes_schema, steps_batch, steps_schema
from replay.format.segment import FOLDER, Segment, episodes_of, open_segment, withdrawn_mask
from replay.format.validation import check_episode
from replay.format.watermark import Watermark
from replay.store.tail import parse_complete, read_mark, read_tail

SEGMENT_BYTES = 1 << 30  # a segment is sealed when its episodes fill this much
ATTEMPTS = 100  # reads of a store that changes meanwhile

log = logging.getLogger(__name__)


class Store:
    """A store at one moment, opened for reading: later changes do not show."""

    def __init__(
        self,
        path: Path | str,
        *,
        fs: FS | None = None,
        skip_damaged: bool = False,
        before: "Store | None" = None,
    ) -> None:
        """Check every byte, then map the segments. InputError names the damaged file.

        skip_damaged  go on without damaged segments; `damaged` names them
        before        an earlier view of the store, whose segments are not checked again
        """
        self.path, self._fs, self._skip_damaged = Path(path), fs or Disk(), skip_damaged
        self.segments: tuple[Segment, ...] = ()
        self.damaged: dict[int, str] = dict(before.damaged) if before else {}
        self._sealed: dict[int, Segment] = dict(before._sealed) if before else {}
        for attempt in range(ATTEMPTS):
            mark = read_mark(self._fs, self.path)  # read first: all else is at least as new
            self._manifest = manifest.read(self._fs, self.path)
            try:
                self._read(mark, before)
                break
            except InputError:  # if the manifest has grown, a writer interfered: read again
                if manifest.read(self._fs, self.path) == self._manifest or attempt == ATTEMPTS - 1:
                    raise
        self.totals = Close(
            segments=len(self.segments),
            steps=int(self.lengths.sum()),
            episodes=len(self.lengths),
        )
        if not self.damaged and self._index.close not in (None, self.totals):
            raise InputError(
                f"{self.path} holds {tuple(self.totals.model_dump().values())[1:]} segments, "
                f"steps, episodes; {self._index.close}"
            )

    def latest(self) -> "Store":
        """Return the store's current state. Segments that still exist are the same objects."""
        if self._index.close is not None or self._is_newest():
            return self
        return Store(self.path, fs=self._fs, skip_damaged=self._skip_damaged, before=self)

    def _is_newest(self) -> bool:
        """Every change of a store changes its mark."""
        mark = self._tail.mark if self._tail else None
        seen = mark is not None and mark.manifest == len(self._manifest)
        return seen and read_mark(self._fs, self.path) == mark

    @property
    def header(self) -> Header:
        return self._index.header

    @property
    def checksum(self) -> str:
        """SHA-256 of the manifest, which lists every segment's SHA-256, and of the open log's salt
        and length, which identify the log's content."""
        digest = hashlib.sha256(self._manifest)
        if self._tail is not None:
            digest.update(self._tail.salt + self._tail.end.to_bytes(8, "little"))
        return digest.hexdigest()

    @property
    def lengths(self) -> Integers:
        return np.concatenate([np.empty(0, np.int64), *(s.lengths for s in self.segments)])

    @property
    def episode_returns(self) -> NDArray[np.float64]:
        return np.concatenate([np.empty(0), *(s.episode_returns for s in self.segments)])

    @property
    def keys(self) -> list[AppendKey]:
        """[E] Keys under which the episodes were appended; none in a finished data set."""
        arrays = [s.keys for s in self.segments if s.keys is not None]
        return [AppendKey(*row) for rows in arrays for row in rows.tolist()]

    @property
    def producers(self) -> Mapping[int, ProducerState]:
        """The state of each slot; a coordinator that lost its data continues from here."""
        return self._tail.producers if self._tail else {}

    @property
    def withdrawn(self) -> NDArray[np.bool_] | None:
        """[E] True where an episode must never be sampled again; None: no episode."""
        if not self._index.withdrawn:
            return None
        marks = [withdrawn_mask(segment, self._index.withdrawn) for segment in self.segments]
        return np.concatenate([np.empty(0, np.bool_), *marks])

    def episodes(self) -> Iterator[Episode]:
        for segment in self.segments:
            yield from episodes_of(segment)

    def _read(self, mark: Watermark | None, before: "Store | None") -> None:
        if before is not None and self._manifest == before._manifest:
            self._index: StoreIndex = before._index  # parsing takes long after many rolls
        else:
            parsed = parse_complete(self._manifest, self.path, mark)
            self._index = index_of(parsed.events, self.path / manifest.NAME)
        for entry in self._index.segments:
            if entry.number not in self._sealed.keys() | self.damaged.keys():
                self._open(entry)
        numbers = {entry.number for entry in self._index.segments}
        self._sealed = {n: s for n, s in self._sealed.items() if n in numbers}
        self.damaged = {n: why for n, why in self.damaged.items() if n in numbers}
        self._tail = None
        if self._index.close is None:
            self._tail = read_tail(
                self._fs, self.path, self._index, before._tail if before else None
            )
        tail = self._tail.chunks if self._tail else ()
        self.segments = (*self._sealed.values(), *tail)

    def _open(self, entry: SegmentEntry) -> None:
        try:
            segment = open_segment(self._fs, self.path / FOLDER, entry, self.header)
        except InputError as error:
            # If the manifest has grown, the segment may have been dropped: it is not damaged.
            if not self._skip_damaged or manifest.read(self._fs, self.path) != self._manifest:
                raise
            self.damaged[entry.number] = str(error)
            log.warning("event=segment-damaged number=%d error=%s", entry.number, error)
        else:
            self._sealed[entry.number] = segment


def read_producers(path: Path, fs: FS | None = None) -> Mapping[int, ProducerState]:
    """Return the state of each slot of a live store, quickly: no segment is read."""
    fs, name = fs or Disk(), path / manifest.NAME
    for _ in range(ATTEMPTS):
        mark = read_mark(fs, path)
        content = manifest.read(fs, path)
        index = index_of(parse_complete(content, path, mark).events, name)
        try:
            return read_tail(fs, path, index, None).producers
        except InputError:
            if manifest.read(fs, path) == content:
                raise
    raise InputError(f"{path} changes faster than it can be read; try again")


class StoreWriter:
    """Writes a finished data set into an empty folder. Use `write_store`, which makes it atomic."""

    def __init__(self, folder: Path, header: Header, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder, self.header, self._segment_bytes = folder, header, segment_bytes
        self._schemas = (
            steps_schema(header.states, header.actions),
            episodes_schema(header.states),
        )
        self._open: list[Episode] = []
        self._open_bytes = 0
        self._seals: list[Seal] = []
        self.steps = self.episodes = 0
        (folder / "segments").mkdir()

    def append(self, episode: Episode) -> None:
        check_episode(episode, self.header, number=self.episodes)
        self._open.append(replace(episode, actions=np.clip(episode.actions, -1.0, 1.0)))
        self.episodes += 1
        self.steps += len(episode)
        self._open_bytes += episode.states.nbytes + episode.actions.nbytes + episode.rewards.nbytes
        if self._open_bytes >= self._segment_bytes:
            self._seal()

    def close(self) -> None:
        if self._open:
            self._seal()
        if not self._seals:
            raise InputError("there is no episode to store; give data with at least one step")
        close = Close(segments=len(self._seals), steps=self.steps, episodes=self.episodes)
        with durable_file(self._folder / manifest.NAME) as file:
            file.write(manifest.encode([self.header, *self._seals, close]))

    def _seal(self) -> None:
        first_number = self.episodes - len(self._open)
        steps, episodes = self._schemas
        self._seals.append(
            Seal(
                steps=self._write("steps", steps_batch(self._open, first_number, steps)),
                episodes=self._write(
                    "episodes", episodes_batch(self._open, first_number, episodes)
                ),
            )
        )
        self._open, self._open_bytes = [], 0

    def _write(self, kind: str, batch: pa.RecordBatch) -> FileEntry:
        path = self._folder / "segments" / f"{len(self._seals):06d}.{kind}.arrow"
        with durable_file(path) as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        return FileEntry(
            name=path.name, rows=batch.num_rows, bytes=path.stat().st_size, sha256=sha256(path)
        )


@contextmanager
def write_store(
    path: Path, header: Header, *, segment_bytes: int = SEGMENT_BYTES
) -> Iterator[StoreWriter]:
    """Yield a writer; the complete store appears at `path` when the block ends, or not at all."""
    with staged_directory(path) as stage:
        writer = StoreWriter(stage, header, segment_bytes=segment_bytes)
        yield writer
        writer.close()
