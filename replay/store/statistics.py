"""Statistics of a store. S state, A action."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m3pc.types import Floats
from replay.store.store import Store

BLOCK = 1 << 16  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of each dimension over all steps."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    states: Moments  # [S]
    actions: Moments  # [A]
    rewards: Moments  # [1]
    terminated: int  # episodes that the task ended
    truncated: int  # episodes that the step limit ended
    cut: int  # episodes with neither end


def statistics(store: Store) -> Statistics:
    parts = store.segments
    terminated = sum(int(part.terminated.sum()) for part in parts)
    truncated = sum(int((part.truncated & ~part.terminated).sum()) for part in parts)
    return Statistics(
        states=moments([part.states for part in parts]),
        actions=moments([part.actions for part in parts]),
        rewards=moments([part.rewards[:, None] for part in parts]),
        terminated=terminated,
        truncated=truncated,
        cut=store.totals.episodes - terminated - truncated,
    )


def moments(parts: list[Floats]) -> Moments:
    """Compute the mean, then the deviations from it, in float64: accurate for any offset."""
    count = sum(len(part) for part in parts)
    mean = sum(part.sum(axis=0, dtype=np.float64) for part in parts) / count
    square = sum(((block - mean) ** 2).sum(axis=0) for block in _blocks(parts)) / count
    return Moments(
        mean=np.asarray(mean),
        std=np.sqrt(square),
        low=np.min([part.min(axis=0) for part in parts], axis=0).astype(np.float64),
        high=np.max([part.max(axis=0) for part in parts], axis=0).astype(np.float64),
    )


def _blocks(parts: list[Floats]) -> Iterator[Floats]:
    """Yield a few rows at a time: mapped data may exceed the memory."""
    for part in parts:
        for first in range(0, len(part), BLOCK):
            yield part[first : first + BLOCK]
