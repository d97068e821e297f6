"""Random pieces of T steps, copied straight from the mapped columns. B batch, R rows, E episodes.

Once the data are larger than the caches, a batch costs what its scattered reads from memory cost;
everything here serves to have few of them.
"""

import mmap
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from m3pc.core.returns import ReturnRule, returns_to_go
from m3pc.core.rng import counter_stream
from m3pc.types import Floats, InputError, Integers, WindowBatch
from replay.format.segment import Segment
from replay.sampling.selectors import by_pieces, only, product, weights
from replay.store.view import EpisodeMask, StoreView, drawable

NumpySegments = WindowBatch[NDArray[Any]]
B = TypeVar("B")
D = TypeVar("D")


class Sampler:
    """Uniform over every piece of T steps that lies inside one episode.

    A batch is a function of (seed, update) alone: nothing is remembered between two calls, so any
    process can draw any batch, in any order, and a resumed run draws what it would have drawn.
    """

    def __init__(
        self,
        store: StoreView,
        *,
        length: int,
        batch: int,
        seed: int,
        returns: ReturnRule,
        chosen: EpisodeMask | None = None,
    ) -> None:
        """From all episodes of the store, or from those that `chosen` [E] names."""
        self._batch, self._seed = batch, seed
        self._pieces = every_piece(store, length, chosen)
        self._columns = WindowBatchBuilder(length, returns, store.segments)

    def __len__(self) -> int:
        """How many different pieces there are."""
        return self._pieces.count

    def batch(self, update: int, out: NumpySegments | None = None) -> NumpySegments:
        """Into the arrays of `out`, or into new ones."""
        drawn = self._pieces.draw(counter_stream(self._seed, update), self._batch)
        return self._columns.gather(drawn, out)


class SegmentRows(NamedTuple):
    """The pieces of a batch that begin in one segment."""

    segment: int
    rows: Integers  # counted from the segment's first
    into: Integers | slice  # their positions in the batch


class SampledRows(NamedTuple):
    """Where B pieces begin."""

    places: list[SegmentRows]
    steps: Integers  # [B] of their episodes


def combined(parts: Sequence[SampledRows], order: Integers) -> SampledRows:
    """One batch of several parts: their pieces, one after another, go to the positions `order`."""
    places, steps, low = [], np.empty_like(order), 0
    for part in parts:
        into = order[low : low + len(part.steps)]
        steps[into] = part.steps
        places += [
            SegmentRows(place.segment, place.rows, into[place.into]) for place in part.places
        ]
        low += len(part.steps)
    return SampledRows(places, steps)


class WindowIndex:
    """All pieces, numbered without gaps by a table over the episodes that have a weight."""

    def __init__(
        self, store: StoreView, length: int, weight: Integers | None = None, *, before: int = 0
    ) -> None:
        """`weight` [E] says how often each episode is drawn; without it every piece is alike.
        Segments are counted from `before` on, where others come first."""
        lengths = store.lengths
        spans = np.maximum(lengths - length + 1, 0)  # pieces in each episode
        weight = spans if weight is None else weight
        used = np.flatnonzero((weight > 0) & (spans > 0))
        self._spans = spans[used]
        self.count = int(self._spans.sum())  # of different pieces
        # Episode e owns the numbers edges[e] .. edges[e + 1] - 1. Where it has as many of them as
        # it has pieces, a number is a piece; otherwise its starting step is drawn apart.
        self._edges = np.append(0, np.cumsum(weight[used]))
        self._numbered = np.array_equal(weight[used], self._spans)
        firsts = [np.cumsum(s.lengths) - s.lengths for s in store.segments]
        self._first_row = np.concatenate([np.zeros(0, np.int64), *firsts])[used]
        after = before + len(store.segments)
        numbers = np.arange(before, after, dtype=np.min_scalar_type(after))  # 16 bits sort by radix
        episodes = np.array([len(segment.lengths) for segment in store.segments], np.int64)
        self._segment = np.repeat(numbers, episodes)[used]

    @property
    def weight(self) -> int:
        """Of all episodes together; 0 where there is nothing to draw."""
        return int(self._edges[-1])

    def draw(self, rng: np.random.Generator, count: int) -> SampledRows:
        numbers = rng.integers(self.weight, size=count)
        episode = np.searchsorted(self._edges, numbers, side="right") - 1
        if self._numbered:
            steps = numbers - self._edges[episode]
        else:
            steps = rng.integers(self._spans[episode])
        rows = self._first_row[episode] + steps
        return SampledRows(self._places(rows, self._segment[episode]), steps)

    def _places(self, rows: Integers, segment: NDArray[Any]) -> list[SegmentRows]:
        if self._segment[0] == self._segment[-1]:  # the only one
            return [SegmentRows(int(self._segment[0]), rows, slice(None))]
        into = np.argsort(segment, kind="stable")
        cuts = np.flatnonzero(np.diff(segment[into])) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        return [
            SegmentRows(int(segment[into[low]]), rows[into[low:high]], into[low:high])
            for low, high in pairwise(bounds)
        ]


def every_piece(store: StoreView, length: int, chosen: EpisodeMask | None) -> WindowIndex:
    """Those of the chosen episodes, each as often as any other."""
    may = drawable(store) if chosen is None else drawable(store) & chosen
    weight = weights(store, product(by_pieces(length), only(may)), length=length)
    if not weight.any():
        raise InputError(
            f"{store.path} has no episode of {length} steps or more (the longest has "
            f"{store.lengths[may].max(initial=0)}); use a shorter length"
        )
    return WindowIndex(store, length, weight)


class BatchBuilder(Protocol[B]):
    """What copies steps of segments into a batch of one kind."""

    @property
    def length(self) -> int: ...  # T steps that belong together

    def at(self, segments: Sequence[Segment]) -> "BatchBuilder[B]":
        """The same of other segments; what is known of those that stay is used again."""

    def gather(self, drawn: SampledRows, out: B | None = None) -> B:
        """Into the arrays of `out`, or into new ones."""


SegmentCache = Mapping[int, tuple[Segment, D]]


def per_segment(
    segments: Sequence[Segment], known: SegmentCache[D], derive: Callable[[Segment], D]
) -> SegmentCache[D]:
    """What is derived from each segment, by its id: nothing else gets that while one is kept."""
    distinct = {id(segment): segment for segment in segments}
    return {key: known.get(key) or (s, derive(s)) for key, s in distinct.items()}


class WindowBatchBuilder:
    """Columns of whole pieces: all overlapping runs of T rows, so that one is one memcpy."""

    def __init__(
        self,
        length: int,
        returns: ReturnRule,
        segments: Sequence[Segment] = (),
        known: SegmentCache[tuple[NDArray[np.void], ...]] = MappingProxyType({}),
    ) -> None:
        self.length, self._returns = length, returns
        self._known = per_segment(segments, known, self._derive)
        self._parts = [self._known[id(segment)][1] for segment in segments]
        self._shapes: tuple[tuple[int, ...], ...] = ()
        for segment in segments[:1]:
            sizes = segment.states.shape[1:], segment.actions.shape[1:], (2,)
            self._shapes = tuple((length, *size) for size in sizes)

    def at(self, segments: Sequence[Segment]) -> "WindowBatchBuilder":
        return WindowBatchBuilder(self.length, self._returns, segments, self._known)

    def gather(self, drawn: SampledRows, out: NumpySegments | None = None) -> NumpySegments:
        steps, outcomes = drawn.steps, self._column(2, drawn)
        if out is None:
            return WindowBatch(
                states=self._column(0, drawn),
                actions=self._column(1, drawn),
                rewards=outcomes[..., 0].copy(),
                returns=outcomes[..., 1].copy(),
                steps=steps,
            )
        self._column(0, drawn, out.states)
        self._column(1, drawn, out.actions)
        out.rewards[:], out.returns[:], out.steps[:] = outcomes[..., 0], outcomes[..., 1], steps
        return out

    def _column(self, number: int, drawn: SampledRows, out: Floats | None = None) -> Floats:
        """[B, T, ...] of one column."""
        shape = (len(drawn.steps), *self._shapes[number])
        if out is None and isinstance(drawn.places[0].into, slice):  # all of them, as they come
            part = self._parts[drawn.places[0].segment][number]
            return part[drawn.places[0].rows].view(np.float32).reshape(shape)
        found = np.empty(shape, np.float32) if out is None else out
        assert found.shape == shape and found.flags.c_contiguous
        items = found.reshape(-1).view(self._parts[0][number].dtype)
        for place in drawn.places:
            items[place.into] = self._parts[place.segment][number][place.rows]
        return found

    def _derive(self, segment: Segment) -> tuple[NDArray[np.void], ...]:
        columns = segment.states, segment.actions, _outcomes(segment, self._returns)
        return tuple(_overlapping(column, self.length) for column in columns)


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
