"""Random single steps with what followed them, for a critic. B batch, R rows, E episodes."""

from collections.abc import Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from m3pc.core.returns import ReturnRule, returns_to_go, steps_within
from m3pc.core.rng import CRITIC_BATCH, counter_stream
from m3pc.types import Floats, Integers, TransitionBatch
from replay.format.segment import Segment
from replay.sampling.sampler import SampledRows, SegmentCache, SegmentRows, every_piece, per_segment
from replay.store.view import EpisodeMask, StoreView

NumpyTransitions = TransitionBatch[NDArray[Any]]


class TransitionSampler:
    """Uniform over every step of the chosen episodes; a batch is a function of (seed, update)."""

    def __init__(
        self,
        store: StoreView,
        *,
        batch: int,
        seed: int,
        discount: float,
        terminals: bool = True,  # whether a task that ended pays nothing more
        chosen: EpisodeMask | None = None,
    ) -> None:
        self._batch, self._seed = batch, seed
        self._pieces = every_piece(store, 1, chosen)
        self._columns = TransitionBatchBuilder(discount, terminals, store.segments)

    def __len__(self) -> int:
        return self._pieces.count

    def batch(self, update: int, out: NumpyTransitions | None = None) -> NumpyTransitions:
        """Into the arrays of `out`, or into new ones."""
        rng = counter_stream(self._seed, update, CRITIC_BATCH)
        return self._columns.gather(self._pieces.draw(rng, self._batch), out)


class SegmentTransitions(NamedTuple):
    """A segment, and what a critic wants to know of its rows."""

    segment: Segment
    episodes: Integers  # [R] to which each belongs
    ends: Integers  # [E] last row of each
    returns: Floats  # [R]


class TransitionBatchBuilder:
    """Columns of single steps."""

    length: ClassVar[int] = 1

    def __init__(
        self,
        discount: float,
        terminals: bool = True,
        segments: Sequence[Segment] = (),
        known: SegmentCache[SegmentTransitions] = MappingProxyType({}),
    ) -> None:
        self._discount, self._terminals = discount, terminals
        self._known = per_segment(segments, known, self._derive)
        self._parts = [self._known[id(segment)][1] for segment in segments]

    def at(self, segments: Sequence[Segment]) -> "TransitionBatchBuilder":
        return TransitionBatchBuilder(self._discount, self._terminals, segments, self._known)

    def gather(self, drawn: SampledRows, out: NumpyTransitions | None = None) -> NumpyTransitions:
        first = self._parts[drawn.places[0].segment].segment
        out = _empty(len(drawn.steps), first) if out is None else out
        for place in drawn.places:
            for name, values in self._gather(place).items():
                getattr(out, name)[place.into] = values
        return out

    def _gather(self, place: SegmentRows) -> dict[str, NDArray[Any]]:
        part, rows = self._parts[place.segment], place.rows
        segment, episodes = part.segment, part.episodes[rows]
        last = rows == part.ends[episodes]
        following = segment.states[np.where(last, rows, rows + 1)]
        following[last] = segment.final_states[episodes[last]]
        return {
            "states": segment.states[rows],
            "actions": segment.actions[rows],
            "rewards": segment.rewards[rows],
            "next_states": following,
            "terminals": last & segment.terminated[episodes],
            "returns": part.returns[rows],
        }

    def _derive(self, segment: Segment) -> SegmentTransitions:
        return SegmentTransitions(
            segment,
            np.repeat(np.arange(len(segment.lengths)), segment.lengths),
            np.cumsum(segment.lengths) - 1,
            discounted_returns(segment, self._discount, self._terminals),
        )


def discounted_returns(segment: Segment, discount: float, terminals: bool = True) -> Floats:
    """Discounted reward from every step on [R]. Where the task did not end the episode, the n steps
    that were seen stand for those that were not: their sum is divided by 1 - discount^n."""
    rule = ReturnRule(max_episode_steps=1, average=False, discount=discount)
    returns = returns_to_go(segment.rewards, segment.lengths, rule).astype(np.float64)
    if discount < 1:
        left: Integers = np.repeat(segment.lengths, segment.lengths) - steps_within(segment.lengths)
        seen = 1 - discount ** left.astype(np.float64)
        returns /= np.where(np.repeat(segment.terminated & terminals, segment.lengths), 1.0, seen)
    return returns.astype(np.float32)


def _empty(count: int, segment: Segment) -> NumpyTransitions:
    state, action = segment.states.shape[1:], segment.actions.shape[1:]
    sizes = {"states": state, "actions": action, "next_states": state}
    return TransitionBatch(
        **{
            field.name: np.empty((count, *sizes.get(field.name, ())), np.float32)
            for field in fields(TransitionBatch)
        }
    )
