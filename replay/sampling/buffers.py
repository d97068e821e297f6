"""The replay buffers of the paper's online phase, as sources of a mixture. E episodes.

A buffer is a function of the logged (offline) and the collected (online) episodes and has no other
state. When a collected episode is withdrawn or dropped by retention, the logged episode that it had
replaced returns. Retention therefore has no effect while it keeps at least as many eligible
episodes as the buffer has slots.
"""

from dataclasses import dataclass

import numpy as np

from m3pc.config.schema import ReplayConfig
from m3pc.core.rng import BUFFER, counter_stream
from m3pc.types import Integers
from replay.sampling.mixture import MixtureSource
from replay.sampling.selectors import (
    Selector,
    best_steps,
    by_length,
    by_return,
    newest_steps,
    only,
    product,
    uniform,
)
from replay.store.view import EpisodeMask, JoinedView, StoreView, drawable


def trajectory_buffer(
    offline: StoreView,
    online: StoreView,
    replay: ReplayConfig,
    *,
    min_length: int,
    seed: int,
    train: EpisodeMask | None = None,
) -> MixtureSource[JoinedView]:
    """The model draws from this source: episodes of `min_length` steps or more, weighted as
    `replay.sampling` says. `train` [E] restricts the logged episodes."""
    buffer = FirstInFirstOut(
        capacity=replay.episodes, min_length=min_length, seed=seed, among=_among(train)
    )
    likelihood = by_length if replay.sampling == "length" else uniform
    return MixtureSource(
        name="buffer",
        view=JoinedView(offline, online),
        selector=product(buffer, likelihood),
        share=1.0,
    )


def transition_buffers(
    offline: StoreView, online: StoreView, replay: ReplayConfig, *, train: EpisodeMask | None = None
) -> list[MixtureSource[StoreView]]:
    """The critic draws from "offline" and, once enough steps are collected, from "online". Within
    a source every step is equally likely.

    Both limits count steps but keep complete episodes: the best logged and the newest collected
    ones. The authors keep the single steps of highest reward, which leaves out how episodes end
    badly. For data of D4RL's size both methods keep all steps.
    """
    logged = best_steps(replay.offline_transitions, among=_among(train))
    collected = newest_steps(replay.online_transitions)
    return [
        MixtureSource(
            name="offline",
            view=offline,
            selector=product(logged, by_length),
            share=1 - replay.online_share,
        ),
        MixtureSource(
            name="online",
            view=online,
            selector=product(collected, by_length),
            share=replay.online_share,
            min_steps=replay.online_after,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstInFirstOut:
    """Selects the episodes in a first-in, first-out buffer. It starts with the best logged episodes
    in random order; then each collected episode replaces the oldest. A collected episode that was
    cut short gets no slot: its returns would say that no reward was to follow.

    With fewer than `capacity` logged episodes there are only as many slots, as with the authors;
    with none there are `capacity` slots.
    """

    capacity: int
    min_length: int  # steps; shorter episodes get no slot
    seed: int
    among: Selector = uniform  # logged episodes with a weight may have a slot

    def __call__(self, view: JoinedView) -> Integers:
        """[E] 1 where an episode has a slot."""
        logged, collected = self.slots(view.offline, view.online)
        weight = np.zeros(len(view.lengths), np.int64)
        weight[logged] = 1
        weight[collected + len(view.offline.lengths)] = 1
        return weight

    def slots(self, offline: StoreView, online: StoreView) -> tuple[Integers, Integers]:
        """Return the numbers of the logged and collected episodes in the buffer, oldest first."""
        best = by_return(offline, min_length=self.min_length, among=self.among)[: self.capacity]
        # Every logged episode has a rank, so withdrawing one does not shuffle the others again.
        rank = counter_stream(self.seed, 0, BUFFER).permutation(len(offline.lengths))
        logged = best[np.argsort(rank[best])]
        eligible = drawable(online) & _ended(online) & (online.lengths >= self.min_length)
        collected = np.flatnonzero(eligible)
        size = len(logged) or self.capacity
        return logged[len(collected) :], collected[-size:]


def _ended(view: StoreView) -> EpisodeMask:
    """[E] False where an episode was cut short."""
    ends = (part.terminated | part.truncated for part in view.segments)
    return np.concatenate([np.zeros(0, np.bool_), *ends])


def _among(train: EpisodeMask | None) -> Selector:
    return uniform if train is None else only(train)
