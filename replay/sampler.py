"""Random pieces of T steps, copied straight from the mapped columns. B batch, R rows.

Once the data are larger than the caches, a batch costs what its scattered reads from memory cost;
everything here serves to have few of them.
"""

import mmap
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from m3pc.returns import ReturnRule, returns_to_go
from m3pc.streams import counter_stream
from m3pc.types import Floats, InputError, SegmentBatch
from replay.segment import Segment
from replay.store import Store

Rows = NDArray[np.int64]
Chosen = NDArray[np.bool_]


class Sampler:
    """Uniform over every piece of T steps that lies inside one episode.

    A batch is a function of (seed, update) alone: nothing is remembered between two calls, so any
    process can draw any batch, in any order, and a resumed run draws what it would have drawn.
    """

    def __init__(
        self,
        store: Store,
        *,
        length: int,
        batch: int,
        seed: int,
        returns: ReturnRule,
        chosen: Chosen | None = None,
    ) -> None:
        """From all episodes of the store, or from those that `chosen` [episodes] names."""
        self._batch, self._seed = batch, seed
        self._pieces = Pieces(store, length, chosen)
        segments = store.segments
        self._states = Windows([segment.states for segment in segments], length)
        self._actions = Windows([segment.actions for segment in segments], length)
        self._outcomes = Windows([_outcomes(segment, returns) for segment in segments], length)

    def __len__(self) -> int:
        """How many different pieces there are."""
        return self._pieces.count

    def batch(self, update: int) -> SegmentBatch[NDArray[Any]]:
        places, steps = self._pieces.draw(counter_stream(self._seed, update), self._batch)
        outcomes = self._outcomes.gather(places, self._batch)
        return SegmentBatch(
            states=self._states.gather(places, self._batch),
            actions=self._actions.gather(places, self._batch),
            rewards=outcomes[..., 0].copy(),
            returns=outcomes[..., 1].copy(),
            steps=steps,
        )


class Place(NamedTuple):
    """The pieces of a batch that begin in one segment."""

    segment: int
    rows: Rows  # counted from the segment's first
    into: Rows  # their positions in the batch


class Pieces:
    """All pieces, numbered without gaps by a table over episodes."""

    def __init__(self, store: Store, length: int, chosen: Chosen | None = None) -> None:
        lengths = store.lengths if chosen is None else np.where(chosen, store.lengths, 0)
        long_enough = lengths >= length
        if not long_enough.any():
            raise InputError(
                f"{store.path} has no episode of {length} steps or more (the longest has "
                f"{lengths.max()}); use a shorter length"
            )
        # Episode e owns the pieces numbered edges[e] .. edges[e + 1] - 1, one a starting step.
        self._edges = np.append(0, np.cumsum(lengths[long_enough] - length + 1))
        self.count = int(self._edges[-1])
        first = np.concatenate([np.cumsum(s.lengths) - s.lengths for s in store.segments])
        self._row_of_piece_0 = first[long_enough] - self._edges[:-1]
        kind = np.min_scalar_type(len(store.segments))  # up to 16 bits sort by radix
        numbers = np.arange(len(store.segments), dtype=kind)
        episodes = [len(segment.lengths) for segment in store.segments]
        self._segment = np.repeat(numbers, episodes)[long_enough]

    def draw(self, rng: np.random.Generator, count: int) -> tuple[list[Place], Rows]:
        """Where `count` pieces begin, and at which steps of their episodes."""
        pieces = rng.integers(self.count, size=count)
        episode = np.searchsorted(self._edges, pieces, side="right") - 1
        rows = self._row_of_piece_0[episode] + pieces
        return self._places(rows, self._segment[episode]), pieces - self._edges[episode]

    def _places(self, rows: Rows, segment: NDArray[Any]) -> list[Place]:
        if self._segment[-1] == 0:  # the only one
            return [Place(0, rows, np.arange(len(rows)))]
        into = np.argsort(segment, kind="stable")
        cuts = np.flatnonzero(np.diff(segment[into])) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        return [
            Place(int(segment[into[low]]), rows[into[low:high]], into[low:high])
            for low, high in pairwise(bounds)
        ]


class Windows:
    """All overlapping runs of T rows of one column: a piece is copied by one memcpy."""

    def __init__(self, parts: list[Floats], length: int) -> None:
        self._views = [_overlapping(part, length) for part in parts]
        self._shape = (length, *parts[0].shape[1:])

    def gather(self, places: list[Place], count: int) -> Floats:
        """[B, T, ...] from the segments in which the B pieces lie."""
        if len(places) == 1:
            found = self._views[places[0].segment][places[0].rows]
        else:
            found = np.empty(count, self._views[0].dtype)
            for place in places:
                found[place.into] = self._views[place.segment][place.rows]
        return found.view(np.float32).reshape(count, *self._shape)


def _overlapping(column: Floats, length: int) -> NDArray[np.void]:
    """A column [R, ...] as R - T + 1 items of T rows each, which share memory."""
    row = column.strides[0]
    count = max(len(column) - length + 1, 0)
    return np.ndarray((count,), f"V{length * row}", buffer=column, strides=(row,))


def _outcomes(segment: Segment, rule: ReturnRule) -> Floats:
    """Reward and return of every step side by side [R, 2]: returns are ours to place, and so both
    come with one read. In huge pages where the system has them: one look-up serves 2 MiB."""
    memory = mmap.mmap(-1, 2 * segment.rewards.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    outcomes = np.frombuffer(memory, np.float32).reshape(-1, 2)
    outcomes[:, 0] = segment.rewards
    outcomes[:, 1] = returns_to_go(segment.rewards, segment.lengths, rule)
    return outcomes
