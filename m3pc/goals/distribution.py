"""How far states lie from those of a data set. N states, S state, E episodes.

Distances are Euclidean, in standard deviations of the data. The typical distance is the median
distance from a state of the data to the nearest state of another episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m3pc.types import Doubles, Episode, Floats

MAX_STATES = 20_000  # states of the data that are kept, evenly spaced
MAX_PROBES = 1_000  # kept states from which the typical distance is measured
BLOCK = 256  # states compared at once
MIN_DISTANCE = 1e-6  # nearer states are the same state, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The states of a data set, normalised."""

    mean: Doubles  # [S]
    std: Doubles  # [S]
    states: Doubles  # [N, S] normalised; doubles, as near states differ in their last digits
    axes: Doubles  # [2, S] the first two principal components
    explained: tuple[float, float]  # share of the variance along each axis
    typical: float  # median distance to the nearest state of another episode

    def plane(self, states: Floats) -> Doubles:
        """States in the plane of the two axes: [N, S] -> [N, 2]"""
        return np.asarray(self._normalised(states) @ self.axes.T)

    def scatter(self) -> Doubles:
        """The data in the same plane: [N, 2]"""
        return np.asarray(self.states @ self.axes.T)

    def distance(self, states: Floats) -> float:
        """Median distance to the nearest state of the data, divided by the typical distance."""
        distances = _nearest_distances(self._normalised(states), self.states)
        return float(np.median(distances)) / self.typical

    def _normalised(self, states: Floats) -> Doubles:
        return np.asarray((states - self.mean) / self.std)


def distribution(episodes: Sequence[Episode]) -> Distribution:
    states = np.concatenate([episode.states for episode in episodes])
    owners = np.repeat(np.arange(len(episodes)), [len(episode.states) for episode in episodes])
    mean, std = states.mean(axis=0, dtype=np.float64), states.std(axis=0, dtype=np.float64)
    std = np.where(std > 0, std, 1.0)
    kept = _evenly(len(states), MAX_STATES)
    normalised = (states[kept] - mean) / std
    axes, explained = _principal_axes(normalised)
    return Distribution(
        mean=mean,
        std=std,
        states=normalised,
        axes=axes,
        explained=explained,
        typical=_typical_distance(normalised, owners[kept]),
    )


def _principal_axes(states: Doubles) -> tuple[Doubles, tuple[float, float]]:
    """The two axes of largest variance [2, S], and their shares; 0 where there is no second."""
    variance, vectors = np.linalg.eigh(np.atleast_2d(np.cov(states, rowvar=False)))
    axes, share = np.zeros((2, states.shape[1])), np.zeros(2)
    for row, column in enumerate(np.argsort(-variance)[:2]):
        sign = np.sign(vectors[:, column].sum()) or 1  # makes the result unique
        axes[row] = vectors[:, column] * sign
        share[row] = variance[column] / max(variance.sum(), np.finfo(float).tiny)
    return axes, (float(share[0]), float(share[1]))


def _typical_distance(states: Doubles, owners: NDArray[np.int64]) -> float:
    probes = _evenly(len(states), MAX_PROBES)
    distances = _nearest_distances(states[probes], states, owners[probes], owners)
    usable = distances[np.isfinite(distances) & (distances > MIN_DISTANCE)]
    return float(np.median(usable)) if len(usable) else 1.0  # with one episode there is no other


def _nearest_distances(
    states: Doubles,
    others: Doubles,
    owners: NDArray[np.int64] | None = None,
    other_owners: NDArray[np.int64] | None = None,
) -> Doubles:
    """Distance of each state to the nearest of the others: [N]

    owners, other_owners  numbers of episodes; others of the same episode are ignored
    """
    squares = (others**2).sum(axis=1)
    nearest = []
    for first in range(0, len(states), BLOCK):
        block = states[first : first + BLOCK]
        distances = (block**2).sum(axis=1)[:, None] - 2 * block @ others.T + squares
        if owners is not None and other_owners is not None:
            distances[owners[first : first + BLOCK, None] == other_owners] = np.inf
        nearest.append(distances.min(axis=1))
    return np.asarray(np.sqrt(np.maximum(np.concatenate(nearest), 0)))


def _evenly(count: int, max_count: int) -> NDArray[np.int64]:
    """At most `max_count` of the numbers 0 to count - 1, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, max_count)).astype(np.int64))
