"""How far states lie from a data set's. N states, S state, E episodes.

Distances are in standard deviations of the data; what is typical among them is how far a state of
the data is from the nearest one of another episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m3pc.types import Episode, Floats

MOST = 20_000  # states of the data that are looked at, evenly over all
PROBES = 1_000  # of them, whose own neighbours tell what is typical
BLOCK = 256  # states compared at once
SAME = 1e-6  # nearer than that is the same state, rounded
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    mean: Doubles  # [S]
    std: Doubles  # [S]
    states: Doubles  # [N, S] of the data, normalised: near ones differ in their last digits
    axes: Doubles  # [2, S] of most variance
    explained: tuple[float, float]  # share of the variance along each
    typical: float  # median distance to the nearest state of another episode

    def plane(self, states: Floats) -> Doubles:
        """[N, S] -> [N, 2]"""
        return np.asarray(self._normalised(states) @ self.axes.T)

    def scatter(self) -> Doubles:
        """The data in the plane: [N, 2]"""
        return np.asarray(self.states @ self.axes.T)

    def distance(self, states: Floats) -> float:
        """Median distance to the nearest state of the data, over the typical one."""
        found = _nearest(self._normalised(states), self.states)
        return float(np.median(found)) / self.typical

    def _normalised(self, states: Floats) -> Doubles:
        return np.asarray((states - self.mean) / self.std)


def distribution(episodes: Sequence[Episode]) -> Distribution:
    states = np.concatenate([episode.states for episode in episodes])
    owners = np.repeat(np.arange(len(episodes)), [len(episode.states) for episode in episodes])
    mean, std = states.mean(axis=0, dtype=np.float64), states.std(axis=0, dtype=np.float64)
    std = np.where(std > 0, std, 1.0)
    kept = _evenly(len(states), MOST)
    normalised = (states[kept] - mean) / std
    axes, explained = _principal(normalised)
    return Distribution(
        mean=mean,
        std=std,
        states=normalised,
        axes=axes,
        explained=explained,
        typical=_typical(normalised, owners[kept]),
    )


def _principal(states: Doubles) -> tuple[Doubles, tuple[float, float]]:
    """The two axes of most variance [2, S] and its share along each; 0 where there is no second."""
    variance, vectors = np.linalg.eigh(np.atleast_2d(np.cov(states, rowvar=False)))
    axes, share = np.zeros((2, states.shape[1])), np.zeros(2)
    for row, which in enumerate(np.argsort(-variance)[:2]):
        axes[row] = vectors[:, which] * (np.sign(vectors[:, which].sum()) or 1)  # one of two signs
        share[row] = variance[which] / max(variance.sum(), np.finfo(float).tiny)
    return axes, (float(share[0]), float(share[1]))


def _typical(states: Doubles, owners: NDArray[np.int64]) -> float:
    probes = _evenly(len(states), PROBES)
    found = _nearest(states[probes], states, owners[probes], owners)
    apart = found[np.isfinite(found) & (found > SAME)]
    return float(np.median(apart)) if len(apart) else 1.0  # one episode has no other


def _nearest(
    states: Doubles,
    others: Doubles,
    owners: NDArray[np.int64] | None = None,
    of_others: NDArray[np.int64] | None = None,
) -> Doubles:
    """Distance of each [N, S] to the nearest of the others, but for those of its own episode."""
    squares = (others**2).sum(axis=1)
    found = []
    for first in range(0, len(states), BLOCK):
        block = states[first : first + BLOCK]
        apart = (block**2).sum(axis=1)[:, None] - 2 * block @ others.T + squares
        if owners is not None and of_others is not None:
            apart[owners[first : first + BLOCK, None] == of_others] = np.inf
        found.append(apart.min(axis=1))
    return np.asarray(np.sqrt(np.maximum(np.concatenate(found), 0)))


def _evenly(count: int, most: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
