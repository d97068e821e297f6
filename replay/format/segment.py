"""One segment: its checked, mapped columns. R rows of steps, E episodes, S state, A action."""

import hashlib
import io
import mmap
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from m3pc.core.returns import ReturnRule, returns_to_go
from m3pc.types import AppendKey, Episode, Floats, InputError, Integers
from replay.format.arrow_file import is_compressed
from replay.format.fs import FS, TEMPORARY, write_file
from replay.format.index import SegmentEntry, StoreIndex
from replay.format.manifest import FileEntry, Header, Withdraw
from replay.format.schema import (
    episodes_batch,
    episodes_schema,
    live_episodes_schema,
    steps_batch,
    steps_schema,
)

FOLDER = "segments"
CURE = "restore it from a copy, or import the data again"

D = TypeVar("D")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Segment:
    """The arrays never change: they are mapped from files, or in memory while the episodes are
    still in a log. Values derived from a segment are therefore cached with it."""

    states: Floats  # [R, S]
    actions: Floats  # [R, A]
    rewards: Floats  # [R]
    lengths: Integers  # [E]
    terminated: NDArray[np.bool_]  # [E]
    truncated: NDArray[np.bool_]  # [E]
    final_states: Floats  # [E, S]
    episode_returns: NDArray[np.float64]  # [E]
    seeds: Integers  # [E]
    versions: Integers  # [E] policy version at the first step
    last_versions: Integers  # [E] policy version at the last step
    target_returns: NDArray[np.float64]  # [E]
    utilities: NDArray[np.float64]  # [E]
    keys: Integers | None  # [E, 3] slot, incarnation, sequence; None in a finished data set
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def cached(self, key: Hashable, derive: Callable[["Segment"], D]) -> D:
        """Return `derive(self)`, computed once per key and kept as long as the segment. The
        result must not refer to the segment: the cycle would delay freeing both."""
        if key not in self._derived:
            self._derived[key] = derive(self)
        derived: D = self._derived[key]
        return derived

    def returns(self, rule: ReturnRule) -> Floats:
        """Return-to-go of every step [R], read-only."""
        return self.cached(rule, lambda segment: _returns(segment, rule))


COLUMNS = tuple(f.name for f in fields(Segment) if f.init)


def _returns(segment: Segment, rule: ReturnRule) -> Floats:
    returns = returns_to_go(segment.rewards, segment.lengths, rule)
    returns.flags.writeable = False
    return returns


def segment_of(episodes: Sequence[Episode], keys: Sequence[AppendKey]) -> Segment:
    """Make a segment in memory, of episodes that are in no segment file yet."""
    return Segment(
        states=np.concatenate([e.states[:-1] for e in episodes]),
        actions=np.concatenate([e.actions for e in episodes]),
        rewards=np.concatenate([e.rewards for e in episodes]),
        lengths=np.array([len(e) for e in episodes], np.int64),
        terminated=np.array([e.terminated for e in episodes]),
        truncated=np.array([e.truncated for e in episodes]),
        final_states=np.stack([e.states[-1] for e in episodes]),
        episode_returns=np.array([e.rewards.sum(dtype=np.float64) for e in episodes]),
        seeds=np.array([e.seed for e in episodes], np.int64),
        versions=np.array([e.version for e in episodes], np.int64),
        last_versions=np.array([e.last_version for e in episodes], np.int64),
        target_returns=np.array([e.target_return for e in episodes], np.float64),
        utilities=np.array([e.utility for e in episodes], np.float64),
        keys=np.array(keys, np.int64),
    )


def concatenated(first: Segment, second: Segment) -> Segment:
    """Copy the episodes of both into one segment."""
    return Segment(
        **{name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in COLUMNS}
    )


class Tables(NamedTuple):
    """The Arrow batches of a segment's two files."""

    steps: pa.RecordBatch
    episodes: pa.RecordBatch


def open_segment(fs: FS, folder: Path, entry: SegmentEntry, header: Header) -> Segment:
    """Check every byte, then map the columns. InputError names the damaged file."""
    return arrays_of(open_tables(fs, folder, entry, header))


def open_tables(fs: FS, folder: Path, entry: SegmentEntry, header: Header) -> Tables:
    schema = live_episodes_schema if header.event == "live" else episodes_schema
    steps = _map(fs, folder, entry.steps, steps_schema(header.states, header.actions))
    episodes = _map(fs, folder, entry.episodes, schema(header.states, header.format))
    lengths = episodes["length"].to_numpy().astype(np.int64)
    first = episodes["first"].to_numpy()
    if lengths.min() < 1 or not np.array_equal(first, np.cumsum(lengths) - lengths):
        raise InputError(
            f"{folder / entry.episodes.name} lists episodes that overlap or leave gaps"
        )
    if lengths.sum() != steps.num_rows:
        raise InputError(
            f"{folder / entry.steps.name} has {steps.num_rows} steps, its episodes {lengths.sum()}"
        )
    return Tables(steps, episodes)


def arrays_of(tables: Tables) -> Segment:
    """Return the batches as numpy arrays, without copies where the layout allows."""
    steps, episodes = tables
    names = [name for name in AppendKey._fields if name in episodes.schema.names]
    return Segment(
        states=_matrix(steps["states"]),
        actions=_matrix(steps["actions"]),
        rewards=steps["rewards"].to_numpy(),
        lengths=episodes["length"].to_numpy().astype(np.int64),
        terminated=episodes["terminated"].to_numpy(zero_copy_only=False),
        truncated=episodes["truncated"].to_numpy(zero_copy_only=False),
        final_states=_matrix(episodes["final_state"]),
        episode_returns=episodes["episode_return"].to_numpy(),
        seeds=episodes["seed"].to_numpy(),
        versions=episodes["version"].to_numpy(),
        last_versions=_tag(episodes, "last_version", np.int64(-1)),
        target_returns=_tag(episodes, "condition", np.float64(np.nan)),
        utilities=_tag(episodes, "utility", np.float64(np.nan)),
        keys=np.stack([episodes[name].to_numpy() for name in names], axis=1) if names else None,
    )


def episodes_of(segment: Segment) -> Iterator[Episode]:
    first = np.cumsum(segment.lengths) - segment.lengths
    for e, (row, length) in enumerate(zip(first, segment.lengths, strict=True)):
        steps = slice(row, row + length)
        yield Episode(
            states=np.concatenate([segment.states[steps], segment.final_states[e : e + 1]]),
            actions=segment.actions[steps],
            rewards=segment.rewards[steps],
            terminated=bool(segment.terminated[e]),
            truncated=bool(segment.truncated[e]),
            seed=int(segment.seeds[e]),
            version=int(segment.versions[e]),
            last_version=int(segment.last_versions[e]),
            target_return=float(segment.target_returns[e]),
            utility=float(segment.utilities[e]),
        )


def withdrawn_mask(segment: Segment, events: Sequence[Withdraw]) -> NDArray[np.bool_]:
    """[E] True where a withdrawn producer sent the episode."""
    mask = np.zeros(len(segment.lengths), np.bool_)
    for event in events:
        assert segment.keys is not None, "only a live store has producers"
        slots, incarnations = segment.keys[:, 0], segment.keys[:, 1]
        any_incarnation = event.incarnation is None
        mask |= (slots == event.slot) & (any_incarnation | (incarnations == event.incarnation))
    return mask


def live_tables(kept: Sequence[tuple[AppendKey, Episode]], index: StoreIndex) -> Tables:
    """Make the batches of a live store's next segment."""
    keys, episodes = zip(*kept, strict=True)
    header, first = index.header, index.totals.episodes
    return Tables(
        steps_batch(episodes, first, steps_schema(header.states, header.actions)),
        episodes_batch(episodes, first, live_episodes_schema(header.states, header.format), keys),
    )


def write_segment(
    fs: FS,
    path: Path,
    number: int,
    kept: Sequence[tuple[AppendKey, Episode]],
    index: StoreIndex,
) -> tuple[FileEntry, FileEntry]:
    """Write segment `number` of the store at `path`, and sync its two files and their names.
    Replaces the files of an earlier attempt."""
    tables, folder = live_tables(kept, index), path / FOLDER
    files = [
        _write(fs, folder / f"{number:06d}.{kind}.arrow", batch)
        for kind, batch in tables._asdict().items()
    ]
    for entry in files:
        fs.rename(folder / (entry.name + TEMPORARY), folder / entry.name)
    fs.sync_folder(folder)
    return files[0], files[1]


def _write(fs: FS, path: Path, batch: pa.RecordBatch) -> FileEntry:
    sink = ColumnParts()
    with pa.ipc.new_file(pa.PythonFile(sink, "w"), batch.schema) as writer:
        writer.write_batch(batch)
    write_file(fs, path.with_name(path.name + TEMPORARY), sink.parts)
    digest = hashlib.sha256()
    for part in sink.parts:
        digest.update(part)
    return FileEntry(
        name=path.name, rows=batch.num_rows, bytes=sink.tell(), sha256=digest.hexdigest()
    )


class ColumnParts(io.RawIOBase):
    """A file in memory that refers to the columns: copies would double a roll's memory and time."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.parts.append(memoryview(content).cast("B"))
        self._size += len(self.parts[-1])
        return len(self.parts[-1])

    def tell(self) -> int:
        return self._size


def check_bytes(fs: FS, folder: Path, entry: FileEntry) -> bytes | mmap.mmap:
    """Return the content of a file. InputError: it is not what the manifest lists."""
    path = folder / entry.name
    try:
        content = fs.map(path)
    except OSError:
        raise InputError(f"{path} is missing, but the manifest lists it; {CURE}") from None
    if len(content) != entry.bytes or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise InputError(f"{path} was changed: it differs from the manifest's SHA-256; {CURE}")
    return content


def _map(fs: FS, folder: Path, entry: FileEntry, schema: pa.Schema) -> pa.RecordBatch:
    path, content = folder / entry.name, check_bytes(fs, folder, entry)
    try:
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            if reader.schema != schema or reader.num_record_batches != 1:
                raise InputError(f"{path} has other columns than its store's format; {CURE}")
            if is_compressed(content):
                raise InputError(f"{path} is compressed, which no store's columns are; {CURE}")
            batch = reader.get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, struct.error) as error:
        raise InputError(f"{path} is not readable as Arrow: {error}; {CURE}") from None
    if any(map(_has_nulls, batch.columns)):
        raise InputError(f"{path} has rows without a value; {CURE}")
    if batch.num_rows != entry.rows:
        raise InputError(f"{path} has {batch.num_rows} rows, the manifest says {entry.rows}")
    return batch


def _has_nulls(column: pa.Array) -> bool:
    vectors = isinstance(column, pa.FixedSizeListArray)
    return bool(column.null_count or (vectors and column.values.null_count))


def _tag(episodes: pa.RecordBatch, name: str, absent: np.generic) -> NDArray[Any]:
    """Return a column, filled with `absent` in stores of format 1, which lack it."""
    if name not in episodes.schema.names:
        return np.full(episodes.num_rows, absent)
    return np.asarray(episodes[name])


def _matrix(column: pa.FixedSizeListArray) -> Floats:
    flat: Floats = column.flatten().to_numpy()
    return flat.reshape(len(column), -1)
