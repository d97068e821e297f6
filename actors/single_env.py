"""Roll a policy out in one environment, one whole episode at a time."""

from dataclasses import dataclass
from typing import Protocol

import gymnasium
import numpy as np

from m3pc.core.seeding import data_episode
from m3pc.types import Episode, Floats


class ActionFn(Protocol):
    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats: ...


class EpisodePolicy(ActionFn, Protocol):
    """A policy during one episode, which it may remember."""

    def stops(self) -> bool:
        """Whether it has played enough, though the environment would go on."""


class EpisodeSchedule(Protocol):
    """Who plays episodes 0, 1, 2, ... of a collection."""

    @property
    def round(self) -> int:
        """Episodes that belong together: a collection ends after the last of them."""

    def start(self, number: int) -> int:
        """The number of the initial state; episodes with the same one begin alike."""

    def player(self, number: int, rng: np.random.Generator) -> EpisodePolicy: ...


@dataclass(frozen=True, slots=True)
class SinglePolicy:
    """One policy plays all episodes, each from its own initial state to its end."""

    policy: ActionFn
    round: int = 1

    def start(self, number: int) -> int:
        return number

    def player(self, number: int, rng: np.random.Generator) -> EpisodePolicy:
        return self

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        return self.policy.act(state, rng)

    def stops(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Several policies that take turns, an episode each."""

    policies: tuple[ActionFn, ...]
    round: int = 1

    def start(self, number: int) -> int:
        return number

    def player(self, number: int, rng: np.random.Generator) -> EpisodePolicy:
        return SinglePolicy(self.policies[number % len(self.policies)])


def play(
    env: gymnasium.Env[Floats, Floats],
    cast: EpisodeSchedule,
    *,
    seed: int,
    number: int,
    version: int = -1,
) -> Episode:
    """Episode `number` of a collection: it depends on that and on the collection's seed only."""
    reset_seed, _ = data_episode(seed, cast.start(number))
    _, rng = data_episode(seed, number)
    return _episode(env, cast.player(number, rng), seed=reset_seed, rng=rng, version=version)


def rollout(
    env: gymnasium.Env[Floats, Floats],
    policy: ActionFn,
    *,
    seed: int,
    rng: np.random.Generator | None,
    version: int = -1,
) -> Episode:
    """One episode from reset to its end. The policy sees the float32 states that are stored."""
    return _episode(env, SinglePolicy(policy), seed=seed, rng=rng, version=version)


def _episode(
    env: gymnasium.Env[Floats, Floats],
    player: EpisodePolicy,
    *,
    seed: int,
    rng: np.random.Generator | None,
    version: int,
) -> Episode:
    """An episode that its player stopped is one that was cut short: neither flag is set."""
    observation, _ = env.reset(seed=seed)
    states = [np.asarray(observation, dtype=np.float32)]
    actions, rewards = [], []
    terminated = truncated = False
    while not (terminated or truncated or player.stops()):
        action = player.act(states[-1], rng)
        observation, reward, terminated, truncated, _ = env.step(action)
        states.append(np.asarray(observation, dtype=np.float32))
        actions.append(action)
        rewards.append(float(reward))
    return Episode(
        states=np.stack(states),
        actions=np.stack(actions).astype(np.float32),
        rewards=np.asarray(rewards, dtype=np.float32),
        terminated=bool(terminated),
        truncated=bool(truncated),
        seed=seed,
        version=version,
    )
