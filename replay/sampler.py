"""Random pieces of T steps, copied straight from the mapped columns. B batch, R rows."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from m3pc.returns import ReturnRule, returns_to_go
from m3pc.types import Floats, InputError, SegmentBatch
from replay.store import Store

Rows = NDArray[np.int64]


class Sampler:
    """Uniform over every piece of T steps that lies inside one episode.

    A batch is a function of (seed, update) alone: nothing is remembered between two calls, so any
    process can draw any batch, in any order, and a resumed run draws what it would have drawn.
    """

    def __init__(
        self, store: Store, *, length: int, batch: int, seed: int, returns: ReturnRule
    ) -> None:
        self._length, self._batch, self._seed = length, batch, seed
        self._starts = Starts(store, length)
        parts = store.segments
        self._bounds = np.cumsum([len(part.rewards) for part in parts])
        self._states = Windows([part.states for part in parts], length)
        self._actions = Windows([part.actions for part in parts], length)
        self._rewards = Windows([part.rewards for part in parts], length)
        to_go = [returns_to_go(part.rewards, part.lengths, returns) for part in parts]
        self._returns = Windows(to_go, length)

    def __len__(self) -> int:
        """How many different pieces there are."""
        return self._starts.count

    def batch(self, update: int) -> SegmentBatch[NDArray[Any]]:
        rows, steps = self._starts.draw(counter_stream(self._seed, update), self._batch)
        places = _split(rows, self._bounds)
        return SegmentBatch(
            states=self._states.gather(places, len(rows)),
            actions=self._actions.gather(places, len(rows)),
            rewards=self._rewards.gather(places, len(rows)),
            returns=self._returns.gather(places, len(rows)),
            steps=steps,
        )


class Starts:
    """The rows that may begin a piece, numbered without gaps by a table over episodes."""

    def __init__(self, store: Store, length: int) -> None:
        lengths = store.lengths
        long_enough = lengths >= length
        if not long_enough.any():
            raise InputError(
                f"{store.path} has no episode of {length} steps or more (the longest has "
                f"{lengths.max()}); use a shorter length"
            )
        # Episode e owns the pieces numbered edges[e] .. edges[e + 1] - 1, one a starting step.
        self._edges = np.append(0, np.cumsum(lengths[long_enough] - length + 1))
        first = (np.cumsum(lengths) - lengths)[long_enough]  # row of step 0, over all segments
        self._row_of_piece_0 = first - self._edges[:-1]
        self.count = int(self._edges[-1])

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Rows, Rows]:
        """Rows and absolute steps where `count` pieces begin."""
        pieces = rng.integers(self.count, size=count)
        episode = np.searchsorted(self._edges, pieces, side="right") - 1
        return self._row_of_piece_0[episode] + pieces, pieces - self._edges[episode]


class Windows:
    """All overlapping runs of T rows of one column: a piece is copied by one memcpy."""

    def __init__(self, parts: list[Floats], length: int) -> None:
        self._views = [_overlapping(part, length) for part in parts]
        self._shape = (length, *parts[0].shape[1:])

    def gather(self, places: "list[Place]", count: int) -> Floats:
        """[B, T, ...] from the parts in which the B pieces lie."""
        if len(places) == 1:
            found = self._views[places[0].part][places[0].rows]
        else:
            found = np.empty(count, self._views[0].dtype)
            for place in places:
                found[place.into] = self._views[place.part][place.rows]
        return found.view(np.float32).reshape(count, *self._shape)


class Place(NamedTuple):
    """The pieces of a batch that lie in one part of the column."""

    part: int
    rows: Rows  # counted from the part's first
    into: Rows  # positions in the batch


def _split(rows: Rows, bounds: Rows) -> list[Place]:
    """Sort rows counted over all parts, which end at `bounds`, by part."""
    if len(bounds) == 1:
        return [Place(0, rows, np.arange(len(rows)))]
    part = np.searchsorted(bounds, rows, side="right")
    into = np.argsort(part, kind="stable")
    cuts = np.searchsorted(part[into], np.arange(len(bounds) + 1))
    first = np.append(0, bounds)
    return [
        Place(index, rows[into[low:high]] - first[index], into[low:high])
        for index, (low, high) in enumerate(pairwise(cuts.tolist()))
        if high > low
    ]


def _overlapping(column: Floats, length: int) -> NDArray[np.void]:
    """A column [R, ...] as R - T + 1 items of T rows each, which share memory."""
    row = column.strides[0]
    count = max(len(column) - length + 1, 0)
    return np.ndarray((count,), f"V{length * row}", buffer=column, strides=(row,))


def counter_stream(seed: int, update: int) -> np.random.Generator:
    """The random stream of one update: Philox is a function of key and counter."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, update, 0]))
