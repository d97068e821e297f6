"""Random single steps with what followed them, for a critic. B batch, R rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3pc.returns import ReturnRule, returns_to_go, steps_within
from m3pc.streams import CRITIC_BATCH, counter_stream
from m3pc.types import Floats, TransitionBatch
from replay.sampler import Chosen, Pieces, Place, Rows
from replay.segment import Segment
from replay.store import Store


class TransitionSampler:
    """Uniform over every step of the chosen episodes; a batch is a function of (seed, update)."""

    def __init__(
        self,
        store: Store,
        *,
        batch: int,
        seed: int,
        discount: float,
        terminals: bool = True,  # whether a task that ended pays nothing more
        chosen: Chosen | None = None,
    ) -> None:
        self._batch, self._seed = batch, seed
        self._pieces = Pieces(store, 1, chosen)
        self._segments = store.segments
        self._episodes = [np.repeat(np.arange(len(s.lengths)), s.lengths) for s in store.segments]
        self._ends = [np.cumsum(s.lengths) - 1 for s in store.segments]
        self._returns = [discounted_returns(s, discount, terminals) for s in store.segments]

    def __len__(self) -> int:
        return self._pieces.count

    def batch(self, update: int) -> TransitionBatch[NDArray[Any]]:
        rng = counter_stream(self._seed, update, CRITIC_BATCH)
        places, _ = self._pieces.draw(rng, self._batch)
        parts = [self._gather(place) for place in places]
        into = np.concatenate([place.into for place in places])
        order = np.argsort(into)
        return TransitionBatch(
            **{name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
        )

    def _gather(self, place: Place) -> dict[str, NDArray[Any]]:
        segment, rows = self._segments[place.segment], place.rows
        episodes = self._episodes[place.segment][rows]
        last = rows == self._ends[place.segment][episodes]
        following = segment.states[np.where(last, rows, rows + 1)]
        following[last] = segment.final_states[episodes[last]]
        return {
            "states": segment.states[rows],
            "actions": segment.actions[rows],
            "rewards": segment.rewards[rows],
            "next_states": following,
            "terminals": (last & segment.terminated[episodes]).astype(np.float32),
            "returns": self._returns[place.segment][rows],
        }


def discounted_returns(segment: Segment, discount: float, terminals: bool = True) -> Floats:
    """Discounted reward from every step on [R]. Where the task did not end the episode, the n steps
    that were seen stand for those that were not: their sum is divided by 1 - discount^n."""
    rule = ReturnRule(horizon=1, average=False, discount=discount)
    returns = returns_to_go(segment.rewards, segment.lengths, rule).astype(np.float64)
    if discount < 1:
        left: Rows = np.repeat(segment.lengths, segment.lengths) - steps_within(segment.lengths)
        seen = 1 - discount ** left.astype(np.float64)
        returns /= np.where(np.repeat(segment.terminated & terminals, segment.lengths), 1.0, seen)
    return returns.astype(np.float32)
