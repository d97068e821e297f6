"""The training behind `m3pc data make`: SAC until a stated return, keeping every episode.

One version of the policy plays each training episode; then one gradient update per step follows.
An episode's version therefore identifies its policy. The result depends on the seed alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from actors.single_env import rollout
from m3pc.core.seeding import data_episode
from m3pc.datagen.policies.networks import Linear, TanhGaussian
from m3pc.datagen.sac import SAC, SACConfig
from m3pc.envs import env_sizes, make, normalised_score
from m3pc.envs.registry import Env
from m3pc.types import Episode, Floats, InputError

# Scores at which training stops, on D4RL's scale: 0 is a random policy, 100 an expert.
QUALITIES: Mapping[str, float] = MappingProxyType(
    {"medium": 40.0, "medium-replay": 40.0, "expert": 90.0}
)
EVALUATION_EPISODES = 10
RECENT = 10  # training episodes that `training_return` averages
DEFAULTS = SACConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One point of the learning curve."""

    steps: int  # environment steps so far
    evaluation_return: float  # mean over EVALUATION_EPISODES of the deterministic policy
    training_return: float  # mean over the last RECENT training episodes
    cpu_seconds: float

    def reached(self, target: float) -> bool:
        """Both returns count, so that one lucky evaluation does not end the training."""
        return min(self.evaluation_return, self.training_return) >= target


@dataclass(frozen=True, slots=True, kw_only=True)
class SACTraining:
    """The result of a training."""

    episodes: tuple[Episode, ...]  # all of them, in order; version = updates before its first step
    curve: tuple[CurvePoint, ...]
    policy: TanhGaussian
    version: int  # updates that made the policy
    reached: bool  # whether the target return was reached


@dataclass(frozen=True, slots=True)
class UniformPolicy:
    """Uniformly random actions, for the first episodes."""

    size: int

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        assert rng is not None, "uniform actions need randomness"
        return rng.uniform(-1, 1, self.size).astype(np.float32)


def target_return_of(env_id: str, quality: str, target: float | None = None) -> float:
    """The return at which training stops: `target`, or else the quality's score on D4RL's scale."""
    if quality not in QUALITIES:
        raise InputError(f"quality is {quality!r}; give one of {', '.join(QUALITIES)}")
    if target is not None:
        return target
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
    on_progress: Callable[[CurvePoint], None] = lambda point: None,
    clock: Callable[[], float] = time.process_time,
) -> SACTraining:
    """Train until the returns reach the target, or for `max_steps` steps."""
    torch.set_num_threads(1)  # for networks this small, synchronisation outweighs a second thread
    words = np.random.SeedSequence(seed).generate_state(3)
    training_seed, evaluation_seed, learner_seed = map(int, words)
    with make(env_id) as env, make(env_id) as evaluation_env:
        state_size, action_size = env_sizes(env)
        sac = SAC(state_size, action_size, settings, seed=learner_seed)
        policy = _policy(sac)
        episodes: list[Episode] = []
        curve: list[CurvePoint] = []
        steps, next_evaluation, reached, started = 0, evaluate_every, False, clock()
        while steps < max_steps and not reached:
            behaviour = policy if steps >= random_steps else UniformPolicy(action_size)
            reset_seed, rng = data_episode(training_seed, len(episodes))
            episode = rollout(env, behaviour, seed=reset_seed, rng=rng, version=sac.updates)
            episodes.append(episode)
            sac.add(episode)
            steps += len(episode)
            if steps >= random_steps:
                sac.update(len(episode))
            if steps >= min(next_evaluation, max_steps):
                next_evaluation = steps + evaluate_every
                point = CurvePoint(
                    steps=steps,
                    evaluation_return=_evaluate(
                        evaluation_env, policy, evaluation_seed, len(curve)
                    ),
                    training_return=_mean_return(episodes[-RECENT:]),
                    cpu_seconds=clock() - started,
                )
                curve.append(point)
                on_progress(point)
                reached = point.reached(target_return)
        return SACTraining(
            episodes=tuple(episodes),
            curve=tuple(curve),
            policy=policy,
            version=sac.updates,
            reached=reached,
        )


def _policy(sac: SAC) -> TanhGaussian:
    """Views on the actor's weights: the policy changes with each update of the learner."""
    *hidden, mean, log_std = (Linear(weight=weight, bias=bias) for weight, bias in sac.layers())
    return TanhGaussian(hidden=tuple(hidden), mean=mean, log_std=log_std)


def _evaluate(env: Env, policy: TanhGaussian, seed: int, number: int) -> float:
    """Mean return of the deterministic policy; each evaluation has reset seeds of its own."""
    first = number * EVALUATION_EPISODES
    resets = [data_episode(seed, first + i)[0] for i in range(EVALUATION_EPISODES)]
    return _mean_return([rollout(env, policy, seed=reset, rng=None) for reset in resets])


def _mean_return(episodes: Sequence[Episode]) -> float:
    return float(np.mean([episode.rewards.sum(dtype=np.float64) for episode in episodes]))
