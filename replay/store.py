"""Episodes on disk: written once, checked at every opening, read through the page cache.

    STORE/MANIFEST                        what exists; nothing else counts
    STORE/segments/000000.steps.arrow     a row a step
    STORE/segments/000000.episodes.arrow  a row an episode

R rows of steps, E episodes, S state, A action.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from m3pc.files import durable_file, sha256, staged_directory
from m3pc.types import Episode, Floats, InputError
from replay import manifest
from replay.manifest import Close, FileEntry, Header, Seal
from replay.schema import FORMAT, episodes_batch, episodes_schema, steps_batch, steps_schema

SEGMENT_BYTES = 1 << 30  # a segment is sealed when its episodes fill this much
ACTION_SLACK = 1e-4  # rounding that recorders were seen to leave beyond [-1, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The mapped columns of one segment. Arrays are read-only views of the file."""

    states: Floats  # [R, S]
    actions: Floats  # [R, A]
    rewards: Floats  # [R]
    lengths: NDArray[np.int64]  # [E]
    terminated: NDArray[np.bool_]  # [E]
    truncated: NDArray[np.bool_]  # [E]
    final_states: Floats  # [E, S]
    episode_returns: NDArray[np.float64]  # [E]
    seeds: NDArray[np.int64]  # [E]
    versions: NDArray[np.int64]  # [E]


class Store:
    """A closed store, opened for reading."""

    def __init__(self, path: Path | str) -> None:
        """Check every byte, then map. Damage of any kind is an InputError that names the file."""
        self.path = Path(path)
        self.header, self._seals, self.totals = manifest.read(self.path)
        self.segments = tuple(self._open(seal) for seal in self._seals)
        counted = (
            len(self.segments),
            sum(len(s.rewards) for s in self.segments),
            sum(len(s.lengths) for s in self.segments),
        )
        if counted != (self.totals.segments, self.totals.steps, self.totals.episodes):
            raise InputError(
                f"{self.path} holds {counted} segments, steps, episodes; {self.totals}"
            )

    @property
    def checksum(self) -> str:
        """SHA-256 of the manifest, which holds the SHA-256 of everything else."""
        return hashlib.sha256((self.path / manifest.NAME).read_bytes()).hexdigest()

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.concatenate([s.lengths for s in self.segments])

    @property
    def episode_returns(self) -> NDArray[np.float64]:
        return np.concatenate([s.episode_returns for s in self.segments])

    def episodes(self) -> Iterator[Episode]:
        for segment in self.segments:
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
                )

    def _open(self, seal: Seal) -> Segment:
        folder = self.path / "segments"
        steps = _map(folder, seal.steps, steps_schema(self.header.states, self.header.actions))
        episodes = _map(folder, seal.episodes, episodes_schema(self.header.states))
        lengths = episodes["length"].to_numpy().astype(np.int64)
        first = episodes["first"].to_numpy()
        if lengths.min() < 1 or not np.array_equal(first, np.cumsum(lengths) - lengths):
            raise InputError(
                f"{folder / seal.episodes.name} lists episodes that overlap or leave gaps"
            )
        if lengths.sum() != steps.num_rows:
            raise InputError(
                f"{folder / seal.steps.name} has {steps.num_rows} steps, "
                f"its episodes {lengths.sum()}"
            )
        return Segment(
            states=_matrix(steps["states"]),
            actions=_matrix(steps["actions"]),
            rewards=steps["rewards"].to_numpy(),
            lengths=lengths,
            terminated=episodes["terminated"].to_numpy(zero_copy_only=False),
            truncated=episodes["truncated"].to_numpy(zero_copy_only=False),
            final_states=_matrix(episodes["final_state"]),
            episode_returns=episodes["episode_return"].to_numpy(),
            seeds=episodes["seed"].to_numpy(),
            versions=episodes["version"].to_numpy(),
        )


class StoreWriter:
    """Takes whole episodes, seals segments in an empty folder. `write_store` is the safe way in."""

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
        check(episode, self.header, number=self.episodes)
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
    """A writer whose store appears at `path` whole when the block ends, or not at all."""
    with staged_directory(path) as stage:
        writer = StoreWriter(stage, header, segment_bytes=segment_bytes)
        yield writer
        writer.close()


def check(episode: Episode, header: Header, number: int) -> None:
    """Refuse an episode that does not fit the store or would poison a learner."""
    length = len(episode)
    expected = {
        "states": (length + 1, header.states),
        "actions": (length, header.actions),
        "rewards": (length,),
    }
    if length < 1:
        raise InputError(f"episode {number} has no step; every episode needs one at least")
    if length > header.horizon:
        raise InputError(
            f"episode {number} has {length} steps, more than the step limit {header.horizon}; "
            "give the right one with --horizon"
        )
    for name, shape in expected.items():
        values: Floats = getattr(episode, name)
        if values.shape != shape or values.dtype != np.float32:
            raise InputError(
                f"episode {number}: {name} are {values.dtype} {list(values.shape)}, "
                f"expected float32 {list(shape)}"
            )
        if not np.isfinite(values).all():
            row = int(np.argwhere(~np.isfinite(values))[0][0])
            raise InputError(
                f"episode {number}: {name} hold NaN or Inf at step {row}; "
                "every number must be finite, clean the source first"
            )
    beyond = float(np.abs(episode.actions).max())
    if beyond > 1 + ACTION_SLACK:
        raise InputError(
            f"episode {number}: an action reaches {beyond:.6g}, expected [-1, 1]; "
            "rescale the actions to the bounds of their space"
        )


def _map(folder: Path, entry: FileEntry, schema: pa.Schema) -> pa.RecordBatch:
    path = folder / entry.name
    if path.is_symlink() or not path.is_file():
        raise InputError(f"{path} is missing, but the manifest lists it; import the data again")
    if path.stat().st_size != entry.bytes or sha256(path) != entry.sha256:
        raise InputError(
            f"{path} was changed: it differs from the manifest's SHA-256; import the data again"
        )
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            if reader.schema != schema or reader.num_record_batches != 1:
                raise InputError(
                    f"{path} has other columns than format {FORMAT}; import the data again"
                )
            batch = reader.get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{path} is not readable as Arrow: {error}; import the data again"
        ) from None
    if any(map(_has_nulls, batch.columns)):
        raise InputError(f"{path} has rows without a value; import the data again")
    if batch.num_rows != entry.rows:
        raise InputError(f"{path} has {batch.num_rows} rows, the manifest says {entry.rows}")
    return batch


def _has_nulls(column: pa.Array) -> bool:
    vectors = isinstance(column, pa.FixedSizeListArray)
    return bool(column.null_count or (vectors and column.values.null_count))


def _matrix(column: pa.FixedSizeListArray) -> Floats:
    flat: Floats = column.flatten().to_numpy()
    return flat.reshape(len(column), -1)
