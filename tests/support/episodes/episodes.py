"""Small episodes for tests, whose numbers say where they came from."""

import math

import numpy as np

from m3pc.types import Episode
from replay.format.manifest import Header


def numbered(number: int, length: int, *, terminated: bool = False, states: int = 2) -> Episode:
    """State dimension 0 is the episode, dimension 1 the step; the reward is step + 1."""
    steps = np.arange(length + 1, dtype=np.float32)
    rows = np.zeros((length + 1, states), np.float32)
    rows[:, 0], rows[:, 1] = number, steps
    return Episode(
        states=rows,
        actions=(steps[:-1, None] / 1000).astype(np.float32),
        rewards=steps[:-1] + 1,
        terminated=terminated,
        truncated=not terminated,
        seed=number + 100,
        version=number + 7,
        last_version=number + 9,
        target_return=number / 2 if number % 3 else math.nan,
        utility=-number / 4,
    )


def header(
    *,
    states: int = 2,
    actions: int = 1,
    max_episode_steps: int = 1000,
    env: str | None = None,
) -> Header:
    return Header(
        states=states,
        actions=actions,
        max_episode_steps=max_episode_steps,
        env=env,
        source={"kind": "test"},
    )


def same(one: Episode, other: Episode) -> bool:
    arrays = all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("states", "actions", "rewards")
    )
    names = ("terminated", "truncated", "seed", "version", "last_version")
    plain = all(getattr(one, name) == getattr(other, name) for name in names)
    measured = [[e.target_return, e.utility] for e in (one, other)]
    return arrays and plain and np.array_equal(measured[0], measured[1], equal_nan=True)
