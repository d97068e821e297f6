"""Draws random single steps with their next states, for a critic. B batch, R rows, E episodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from m3pc.core.returns import ReturnRule, steps_within
from m3pc.core.rng import CRITIC_BATCH, counter_stream
from m3pc.types import Floats, Integers, TransitionBatch
from replay.format.segment import Segment
from replay.sampling.sampler import SampledRows, window_index
from replay.store.view import EpisodeMask, StoreView

NumpyTransitions = TransitionBatch[NDArray[Any]]


class TransitionSampler:
    """Draws uniformly from all chosen episodes' steps; a batch is a function of (seed, update)."""

    def __init__(
        self,
        store: StoreView,
        *,
        batch: int,
        seed: int,
        discount: float,
        terminals: bool = True,  # whether termination ends the returns
        chosen: EpisodeMask | None = None,
    ) -> None:
        self._batch, self._seed = batch, seed
        self._steps = window_index(store, 1, chosen)
        self._builder = TransitionBatchBuilder(discount, terminals)

    def __len__(self) -> int:
        return self._steps.count

    def batch(self, update: int) -> NumpyTransitions:
        rng = counter_stream(self._seed, update, CRITIC_BATCH)
        return self._builder.gather(self._steps.draw(rng, self._batch))


class TransitionColumns(NamedTuple):
    """Values for a critic, derived from a segment's columns."""

    episodes: Integers  # [R] number of each row's episode in the segment
    last_rows: Integers  # [E] last row of each episode
    returns: Floats  # [R]


@dataclass(frozen=True, slots=True)
class TransitionBatchBuilder:
    """Copies single steps."""

    discount: float
    terminals: bool = True
    length: ClassVar[int] = 1

    def gather(self, drawn: SampledRows) -> NumpyTransitions:
        columns: dict[str, NDArray[Any]] = {}
        for part in drawn.parts:
            for name, values in self._transitions(part.segment, part.rows).items():
                if name not in columns:
                    columns[name] = np.empty((len(drawn.steps), *values.shape[1:]), np.float32)
                columns[name][part.positions] = values
        return TransitionBatch(**columns)

    def _transitions(self, segment: Segment, rows: Integers) -> Mapping[str, NDArray[Any]]:
        columns = segment.cached(self, self._columns)
        episodes = columns.episodes[rows]
        last = rows == columns.last_rows[episodes]
        next_states = segment.states[np.where(last, rows, rows + 1)]
        next_states[last] = segment.final_states[episodes[last]]
        return {
            "states": segment.states[rows],
            "actions": segment.actions[rows],
            "rewards": segment.rewards[rows],
            "next_states": next_states,
            "terminals": last & segment.terminated[episodes],
            "returns": columns.returns[rows],
        }

    def _columns(self, segment: Segment) -> TransitionColumns:
        return TransitionColumns(
            np.repeat(np.arange(len(segment.lengths)), segment.lengths),
            np.cumsum(segment.lengths) - 1,
            discounted_returns(segment, self.discount, self.terminals),
        )


def discounted_returns(segment: Segment, discount: float, terminals: bool = True) -> Floats:
    """Discounted return from every step on [R]. If the task did not end the episode, the sum over
    the n observed steps is divided by 1 - discount^n, as if the rewards continued alike."""
    rule = ReturnRule(max_episode_steps=1, average=False, discount=discount)
    returns = segment.returns(rule).astype(np.float64)
    if discount < 1:
        left: Integers = np.repeat(segment.lengths, segment.lengths) - steps_within(segment.lengths)
        observed = 1 - discount ** left.astype(np.float64)
        ended = np.repeat(segment.terminated & terminals, segment.lengths)
        returns /= np.where(ended, 1.0, observed)
    return returns.astype(np.float32)
