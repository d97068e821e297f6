"""How near an episode came to its waypoints. L steps of it, N steps that matter, K key dimensions.

An episode that ended before step N counts as if it had stayed where it ended.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m3pc.goals.guides import held
from m3pc.types import Floats

MEASURES = {  # field of `Tracking`: what it is
    "rms": "root mean square distance of the key from the goal",
    "distance": "mean distance of the key from the goal",
    "final": "distance of the key from the goal at the last step",
    "within": "share of steps within the tolerance",
    "deviation": "root mean square distance over all dimensions, in standard deviations",
    "success": "share of episodes that succeeded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """Of one episode, in the key's unit unless said otherwise. The first state is not counted."""

    rms: float
    distance: float
    final: float
    within: float  # 0 to 1
    deviation: float  # in standard deviations of the data
    success: float  # 0 or 1


def distances(states: Floats, table: Floats, key: tuple[int, ...]) -> NDArray[np.float64]:
    """[L + 1, S] and a table of as many rows or more -> [L + 1], over the key dimensions."""
    apart = states[:, key].astype(np.float64) - table[: len(states), key]
    return np.asarray(np.sqrt((apart**2).sum(axis=1)))


def near(
    states: Floats, table: Floats, *, key: tuple[int, ...], first: int, tolerance: float
) -> bool:
    """Whether the root mean square distance from step `first` on is at most the tolerance."""
    return _rms(distances(states, table, key)[first:]) <= tolerance


def track(
    states: Floats,
    table: Floats,
    *,
    key: tuple[int, ...],
    steps: int,
    tolerance: float,
    spread: Floats,
    success: bool,
) -> Tracking:
    """states [L + 1, S], table [N + 1 or more, S], spread [S]: the data's standard deviation."""
    visited = held(states, steps + 1)
    apart = distances(visited, table, key)[1:]
    scaled = (visited[1:].astype(np.float64) - table[1 : steps + 1]) / spread
    return Tracking(
        rms=_rms(apart),
        distance=float(apart.mean()),
        final=float(apart[-1]),
        within=float((apart <= tolerance).mean()),
        deviation=_rms(scaled),
        success=float(success),
    )


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt((values**2).mean()))
