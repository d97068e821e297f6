"""Roll a policy out in one environment, one whole episode at a time."""

from typing import Protocol

import gymnasium
import numpy as np

from m3pc.types import Episode, Floats


class Policy(Protocol):
    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats: ...


def episode_streams(seed: int, *numbers: int) -> tuple[int, np.random.Generator]:
    """The environment's reset seed and the policy's noise, from (run seed, episode) alone."""
    sequence = np.random.SeedSequence([seed, *numbers])
    reset_seed, noise_seed = sequence.spawn(2)
    # Gymnasium takes a non-negative Python integer; 31 bits are safe for every environment.
    return int(reset_seed.generate_state(1)[0] >> 1), np.random.default_rng(noise_seed)


def rollout(
    env: gymnasium.Env[Floats, Floats],
    policy: Policy,
    *,
    seed: int,
    rng: np.random.Generator | None,
    version: int = -1,
) -> Episode:
    """One episode from reset to its end. The policy sees the float32 states that are stored."""
    observation, _ = env.reset(seed=seed)
    states = [np.asarray(observation, dtype=np.float32)]
    actions, rewards = [], []
    terminated = truncated = False
    while not (terminated or truncated):
        action = policy.act(states[-1], rng)
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
