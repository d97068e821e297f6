"""Train a behaviour policy with SAC until it reaches a stated return, and keep all it did.

Each training episode is played whole by one version of the policy; as many gradient updates as it
had steps follow. So an episode's version says exactly who acted; a run depends on its seed alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from actors.single_env import rollout
from learner.sac import SAC, SACConfig
from m3pc.core.seeding import data_episode
from m3pc.datagen.policies.networks import Linear, TanhGaussian
from m3pc.envs import make, normalised_score
from m3pc.envs.registry import Env
from m3pc.types import Episode, Floats, InputError

# Where training stops, on D4RL's scale: 0 is a random policy, 100 an expert.
QUALITIES: Mapping[str, float] = MappingProxyType(
    {"medium": 40.0, "medium-replay": 40.0, "expert": 90.0}
)
EVALUATION_EPISODES = 10
RECENT = 10  # training episodes behind `training_return`
DEFAULTS = SACConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One point of the learning curve."""

    steps: int  # taken in the environment so far
    evaluation_return: float  # mean over EVALUATION_EPISODES of the deterministic policy
    training_return: float  # mean over the last RECENT training episodes
    cpu_seconds: float

    def reached(self, target: float) -> bool:
        """With noise and without: one lucky evaluation does not make a policy."""
        return min(self.evaluation_return, self.training_return) >= target


@dataclass(frozen=True, slots=True, kw_only=True)
class SACTraining:
    episodes: tuple[Episode, ...]  # all of them, in order; version = updates done when each began
    curve: tuple[CurvePoint, ...]
    policy: TanhGaussian
    version: int  # updates behind the policy
    reached: bool  # the target return


@dataclass(frozen=True, slots=True)
class UniformPolicy:
    """The policy of the first episodes."""

    size: int

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        assert rng is not None, "uniform actions need randomness"
        return rng.uniform(-1, 1, self.size).astype(np.float32)


def stated_return(env_id: str, quality: str, given: float | None = None) -> float:
    """The return at which training stops: as given, or the quality's score on D4RL's scale."""
    if quality not in QUALITIES:
        raise InputError(f"quality is {quality!r}; give one of {', '.join(QUALITIES)}")
    if given is not None:
        return given
    zero, one = (normalised_score(env_id, episode_return) for episode_return in (0.0, 1.0))
    if zero is None or one is None:
        raise InputError(
            f"{env_id} has no reference score, so {quality!r} does not say at which return to "
            "stop; give the target return as a number"
        )
    return (QUALITIES[quality] - zero) / (one - zero)  # a score is linear in the return


def train(
    env_id: str,
    *,
    target_return: float,
    max_steps: int,
    seed: int,
    evaluate_every: int = 1_000,
    random_steps: int = 1_000,
    settings: SACConfig = DEFAULTS,
    on_progress: Callable[[CurvePoint], None] = lambda progress: None,
    clock: Callable[[], float] = time.process_time,
) -> SACTraining:
    """SAC until its returns reach the target, or `max_steps` have passed."""
    torch.set_num_threads(1)  # networks this small lose more to waiting than a second thread wins
    training_seed, evaluation_seed, learner_seed = _seeds(seed, 3)
    with make(env_id) as env, make(env_id) as evaluation_env:
        state_size, action_size = _sizes(env)
        sac = SAC(state_size, action_size, settings, seed=learner_seed)
        policy = _policy(sac)
        episodes: list[Episode] = []
        curve: list[CurvePoint] = []
        steps, due, reached, started = 0, evaluate_every, False, clock()
        while steps < max_steps and not reached:
            behaviour = policy if steps >= random_steps else UniformPolicy(action_size)
            reset_seed, rng = data_episode(training_seed, len(episodes))
            episode = rollout(env, behaviour, seed=reset_seed, rng=rng, version=sac.updates)
            episodes.append(episode)
            sac.add(episode)
            steps += len(episode)
            if steps >= random_steps:
                sac.update(len(episode))
            if steps >= min(due, max_steps):
                due = steps + evaluate_every
                starts = _evaluation_starts(evaluation_seed, len(curve))
                progress = CurvePoint(
                    steps=steps,
                    evaluation_return=_evaluate(evaluation_env, policy, starts),
                    training_return=_mean_return(episodes[-RECENT:]),
                    cpu_seconds=clock() - started,
                )
                curve.append(progress)
                on_progress(progress)
                reached = progress.reached(target_return)
        return SACTraining(
            episodes=tuple(episodes),
            curve=tuple(curve),
            policy=policy,
            version=sac.updates,
            reached=reached,
        )


def _seeds(seed: int, count: int) -> list[int]:
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count)]


def _sizes(env: Env) -> tuple[int, int]:
    """Numbers in a state and in an action."""
    assert env.observation_space.shape and env.action_space.shape
    return env.observation_space.shape[0], env.action_space.shape[0]


def _policy(sac: SAC) -> TanhGaussian:
    """The actor as it is; views on it, so it changes when the learner updates."""
    *hidden, mean, log_std = (Linear(weight=weight, bias=bias) for weight, bias in sac.layers())
    return TanhGaussian(hidden=tuple(hidden), mean=mean, log_std=log_std)


def _evaluation_starts(seed: int, number: int) -> list[int]:
    """Seeds of the resets in one evaluation; no other evaluation has them."""
    first = number * EVALUATION_EPISODES
    return [data_episode(seed, first + i)[0] for i in range(EVALUATION_EPISODES)]


def _evaluate(env: Env, policy: TanhGaussian, starts: Sequence[int]) -> float:
    """Mean return of the deterministic policy."""
    return _mean_return([rollout(env, policy, seed=start, rng=None) for start in starts])


def _mean_return(episodes: Sequence[Episode]) -> float:
    return float(np.mean([episode.rewards.sum(dtype=np.float64) for episode in episodes]))
