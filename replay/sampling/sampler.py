"""Random windows of T steps, copied straight from the mapped columns. B batch, R rows, E episodes.

    WindowIndex    numbers the windows of a view and draws some of them: SampledRows
    BatchBuilder   copies the steps of the drawn windows into a batch

When the data exceed the CPU caches, scattered memory reads dominate the cost of a batch; this
module keeps them few.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from m3pc.core.returns import ReturnRule
from m3pc.core.rng import counter_stream
from m3pc.types import Floats, InputError, Integers, WindowBatch
from replay.format.segment import Segment
from replay.sampling.selectors import by_windows, episode_weights, only, product
from replay.store.view import EpisodeMask, StoreView, drawable

NumpyWindows = WindowBatch[NDArray[Any]]
B_co = TypeVar("B_co", covariant=True)


class Sampler:
    """Draws uniformly from all windows of T steps that lie inside one episode.

    A batch is a function of (seed, update) alone: any process can draw any batch, in any order, and
    a resumed run draws the same batches.
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
        """`chosen` [E] restricts the episodes; None: all of the store."""
        self._batch, self._seed = batch, seed
        self._windows = window_index(store, length, chosen)
        self._builder = WindowBatchBuilder(length, returns)

    def __len__(self) -> int:
        """How many different windows there are."""
        return self._windows.count

    def batch(self, update: int) -> NumpyWindows:
        drawn = self._windows.draw(counter_stream(self._seed, update), self._batch)
        return self._builder.gather(drawn)


class SegmentRows(NamedTuple):
    """The windows of a batch that begin in one segment."""

    segment: Segment
    rows: Integers  # first row of each window in the segment
    positions: Integers | slice  # each window's position in the batch


class SampledRows(NamedTuple):
    """Where B windows begin."""

    parts: list[SegmentRows]
    steps: Integers  # [B] start of each window, in steps since its episode's reset


class BatchBuilder(Protocol[B_co]):
    """Copies the steps of drawn windows into a batch of one kind."""

    @property
    def length(self) -> int: ...  # T, steps per window

    def gather(self, drawn: SampledRows) -> B_co: ...


class WindowIndex:
    """Numbers all windows of the episodes that have a weight, without gaps."""

    def __init__(self, store: StoreView, length: int, weights: Integers) -> None:
        """Episodes are drawn in proportion to `weights` [E]."""
        spans = np.maximum(store.lengths - length + 1, 0)  # windows in each episode
        used = np.flatnonzero((weights > 0) & (spans > 0))
        self._spans = spans[used]
        self.count = int(self._spans.sum())  # different windows
        # Episode e owns the numbers edges[e] .. edges[e + 1] - 1. If every episode owns as many as
        # it has windows, a number is a window; otherwise the window's start is drawn separately.
        self._edges = np.append(0, np.cumsum(weights[used]))
        self._numbered = np.array_equal(weights[used], self._spans)
        self._segments = store.segments
        firsts = [np.cumsum(s.lengths) - s.lengths for s in store.segments]
        self._first_row = np.concatenate([np.zeros(0, np.int64), *firsts])[used]
        count = len(store.segments)
        numbers = np.arange(count, dtype=np.min_scalar_type(count))  # sorted by radix up to 16 bits
        episodes = np.array([len(segment.lengths) for segment in store.segments], np.int64)
        self._segment_number = np.repeat(numbers, episodes)[used]

    @property
    def weight(self) -> int:
        """Sum of the weights; 0 if there is nothing to draw."""
        return int(self._edges[-1])

    def draw(self, rng: np.random.Generator, count: int) -> SampledRows:
        numbers = rng.integers(self.weight, size=count)
        episode = np.searchsorted(self._edges, numbers, side="right") - 1
        if self._numbered:
            steps = numbers - self._edges[episode]
        else:
            steps = rng.integers(self._spans[episode])
        rows = self._first_row[episode] + steps
        return SampledRows(self._by_segment(rows, self._segment_number[episode]), steps)

    def _by_segment(self, rows: Integers, segment: NDArray[Any]) -> list[SegmentRows]:
        """Group the windows by segment, so that successive reads come from the same file."""
        if self._segment_number[0] == self._segment_number[-1]:  # the only one
            return [SegmentRows(self._segments[self._segment_number[0]], rows, slice(None))]
        positions = np.argsort(segment, kind="stable")
        cuts = np.flatnonzero(np.diff(segment[positions])) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        return [
            SegmentRows(
                self._segments[segment[positions[low]]],
                rows[positions[low:high]],
                positions[low:high],
            )
            for low, high in pairwise(bounds)
        ]


def window_index(store: StoreView, length: int, chosen: EpisodeMask | None) -> WindowIndex:
    """Index every window of the chosen episodes, all equally likely."""
    mask = drawable(store) if chosen is None else drawable(store) & chosen
    weights = episode_weights(store, product(by_windows(length), only(mask)), length=length)
    if not weights.any():
        raise InputError(
            f"{store.path} has no episode of {length} steps or more (the longest has "
            f"{store.lengths[mask].max(initial=0)}); use a shorter length"
        )
    return WindowIndex(store, length, weights)


class WindowColumns(NamedTuple):
    """The columns of a segment as overlapping runs of T rows, so that a window is one memcpy."""

    states: NDArray[np.void]
    actions: NDArray[np.void]
    outcomes: NDArray[np.void]  # reward and return of each step


@dataclass(frozen=True, slots=True)
class WindowBatchBuilder:
    """Copies complete windows."""

    length: int  # T
    returns: ReturnRule

    def gather(self, drawn: SampledRows) -> NumpyWindows:
        columns = [part.segment.cached(self, self._columns) for part in drawn.parts]
        outcomes = self._copied(drawn, [column.outcomes for column in columns])
        return WindowBatch(
            states=self._copied(drawn, [column.states for column in columns]),
            actions=self._copied(drawn, [column.actions for column in columns]),
            rewards=outcomes[..., 0].copy(),
            returns=outcomes[..., 1].copy(),
            steps=drawn.steps,
        )

    def _copied(self, drawn: SampledRows, columns: list[NDArray[np.void]]) -> Floats:
        """Copy a column [B, T, ...] of the drawn windows; `columns` holds that of each part."""
        count, parts = len(drawn.steps), drawn.parts
        if isinstance(parts[0].positions, slice):  # one segment holds all of them, in order
            windows = columns[0][parts[0].rows]
        else:
            windows = np.empty(count, columns[0].dtype)
            for part, column in zip(parts, columns, strict=True):
                windows[part.positions] = column[part.rows]
        return windows.view(np.float32).reshape(count, self.length, -1)

    def _columns(self, segment: Segment) -> WindowColumns:
        # Reward and return side by side [R, 2], so that one read brings both.
        outcomes = np.stack([segment.rewards, segment.returns(self.returns)], axis=1)
        columns = segment.states, segment.actions, outcomes
        return WindowColumns(*(_overlapping(column, self.length) for column in columns))


def _overlapping(column: Floats, length: int) -> NDArray[np.void]:
    """View a column [R, ...] as R - T + 1 overlapping items of T rows each."""
    row = column.strides[0]
    count = max(len(column) - length + 1, 0)
    return np.ndarray((count,), f"V{length * row}", buffer=column, strides=(row,))
