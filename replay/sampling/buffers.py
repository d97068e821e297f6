"""What the paper learns from while it collects: its buffers, as sources. E episodes.

A buffer is a function of the logged and the collected episodes: nothing is remembered between two
processes. A collected episode that was withdrawn, or that retention has dropped, is as if it had
never come; a logged one that it pushed out is back. Retention therefore changes nothing as long as
it keeps at least as many that may have a slot as the buffer has slots.
"""

from dataclasses import dataclass

import numpy as np

from m3pc.config.schema import ReplayConfig
from m3pc.core.rng import BUFFER, counter_stream
from m3pc.types import Integers
from replay.sampling.mixture import MixtureSource, fixed
from replay.sampling.selectors import (
    Selection,
    alike,
    best_steps,
    by_length,
    by_return,
    newest_steps,
    only,
    product,
)
from replay.store.view import EpisodeMask, JoinedView, StoreView, drawable


def trajectory_buffer(
    offline: StoreView,
    online: StoreView,
    replay: ReplayConfig,
    *,
    minimum: int,
    seed: int,
    train: EpisodeMask | None = None,
) -> MixtureSource:
    """For the model: episodes of `minimum` steps or more, of the logged ones only those in
    `train` [E]. An episode's chance is what replay.sampling says."""
    buffer = FirstInFirstOut(
        capacity=replay.episodes, minimum=minimum, seed=seed, among=_among(train)
    )
    chance = by_length if replay.sampling == "length" else alike
    return MixtureSource(
        name="buffer",
        view=JoinedView(offline, online),
        selection=product(buffer, chance),
        share=fixed(1.0),
    )


def transition_buffers(
    offline: StoreView, online: StoreView, replay: ReplayConfig, *, train: EpisodeMask | None = None
) -> list[MixtureSource]:
    """For the critic: logged steps only, until enough are collected. Every step alike.

    Both limits count steps and are kept by whole episodes: the best logged ones, the newest
    collected ones. Single steps of highest reward, as the authors sort them, would leave out how
    episodes end badly; with as many steps as D4RL has it is the same, namely all of them.
    """
    logged = best_steps(replay.offline_transitions, among=_among(train))
    collected = newest_steps(replay.online_transitions)
    return [
        MixtureSource(
            name="offline",
            view=offline,
            selection=product(logged, by_length),
            share=fixed(1 - replay.online_share),
        ),
        MixtureSource(
            name="online",
            view=online,
            selection=product(collected, by_length),
            share=fixed(replay.online_share),
            after=replay.online_after,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstInFirstOut:
    """Slots for episodes: at first the best logged ones in random order, then each collected one
    takes the place of the oldest. One that was cut short takes none: its returns would say that
    nothing more was to come.

    Where fewer than `capacity` are logged, there are only as many slots, as with the authors; where
    none are, the collected ones fill `capacity` slots.
    """

    capacity: int
    minimum: int  # steps of an episode that gets a slot
    seed: int
    among: Selection = alike  # logged ones that may have a slot

    def __call__(self, view: StoreView) -> Integers:
        """1 where an episode of the joined view has a slot."""
        assert isinstance(view, JoinedView)
        logged, collected = self.slots(view.first, view.second)
        weight = np.zeros(len(view.lengths), np.int64)
        weight[logged] = 1
        weight[collected + len(view.first.lengths)] = 1
        return weight

    def slots(self, offline: StoreView, online: StoreView) -> tuple[Integers, Integers]:
        """Numbers of the logged and of the collected episodes that have one, the oldest first."""
        best = by_return(offline, minimum=self.minimum, among=self.among)[: self.capacity]
        # A rank for every logged episode: withdrawing one does not shuffle the others again.
        rank = counter_stream(self.seed, 0, BUFFER).permutation(len(offline.lengths))
        logged = best[np.argsort(rank[best])]
        may = drawable(online) & _ended(online) & (online.lengths >= self.minimum)
        collected = np.flatnonzero(may)
        size = len(logged) or self.capacity
        return logged[len(collected) :], collected[-size:]


def _ended(view: StoreView) -> EpisodeMask:
    """[E] False where an episode was cut short."""
    ends = (part.terminated | part.truncated for part in view.segments)
    return np.concatenate([np.zeros(0, np.bool_), *ends])


def _among(train: EpisodeMask | None) -> Selection:
    return alike if train is None else only(train)
