"""Roll a policy out in one environment, one episode at a time, to make data sets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import gymnasium
import numpy as np

from m3pc.core.episode_recorder import EpisodeRecorder
from m3pc.core.seeding import data_episode
from m3pc.types import Episode, Floats


class ActionFn(Protocol):
    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats: ...


class EpisodePolicy(ActionFn, Protocol):
    """A policy for one episode; it may keep state from step to step."""

    def stops(self) -> bool:
        """Whether to cut the episode short here."""


class EpisodeSchedule(Protocol):
    """Which policy plays episodes 0, 1, 2, ... of a collection, and from which initial state."""

    @property
    def episodes_per_round(self) -> int:
        """Episodes that belong together: a collection ends after the last of them."""

    def initial_state(self, number: int) -> int:
        """The number of the initial state; episodes with the same number begin alike."""

    def policy_of(self, number: int, rng: np.random.Generator) -> EpisodePolicy: ...


@dataclass(frozen=True, slots=True)
class SinglePolicy:
    """One policy plays all episodes, each from its own initial state to its end."""

    policy: ActionFn
    episodes_per_round: int = 1

    def initial_state(self, number: int) -> int:
        return number

    def policy_of(self, number: int, rng: np.random.Generator) -> EpisodePolicy:
        return self

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        return self.policy.act(state, rng)

    def stops(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Several policies that take turns, an episode each."""

    policies: tuple[ActionFn, ...]
    episodes_per_round: int = 1

    def initial_state(self, number: int) -> int:
        return number

    def policy_of(self, number: int, rng: np.random.Generator) -> EpisodePolicy:
        return SinglePolicy(self.policies[number % len(self.policies)])


def play(
    env: gymnasium.Env[Floats, Floats],
    schedule: EpisodeSchedule,
    *,
    seed: int,
    number: int,
    version: int = -1,
) -> Episode:
    """Play episode `number` of a collection. It depends on `seed` and `number` only."""
    reset_seed, _ = data_episode(seed, schedule.initial_state(number))
    _, rng = data_episode(seed, number)
    policy = schedule.policy_of(number, rng)
    return rollout(env, policy, seed=reset_seed, rng=rng, version=version, stops=policy.stops)


def rollout(
    env: gymnasium.Env[Floats, Floats],
    policy: ActionFn,
    *,
    seed: int,
    rng: np.random.Generator | None,
    version: int = -1,
    stops: Callable[[], bool] = lambda: False,
) -> Episode:
    """Play one episode, cut short before a step at which `stops()` is true. The policy sees the
    float32 states that are stored."""
    observation, _ = env.reset(seed=seed)
    state = np.asarray(observation, dtype=np.float32)
    recorder = EpisodeRecorder(state, seed=seed)
    terminated = truncated = False
    while not (terminated or truncated or stops()):
        action = policy.act(state, rng)
        observation, reward, terminated, truncated, _ = env.step(action)
        state = np.asarray(observation, dtype=np.float32)
        recorder.add(action, float(reward), state)
    episode = recorder.episode(terminated=bool(terminated), truncated=bool(truncated))
    return replace(episode, version=version)
