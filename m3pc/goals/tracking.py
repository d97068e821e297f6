"""How close an episode came to its waypoints. L its steps, N the task's, K key dimensions.

An episode that ends before step N counts as if it stayed in its last state.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m3pc.goals.waypoints import pad_rows
from m3pc.types import Floats

MEASURES = {  # field of `Tracking`: its meaning
    "rms": "root mean square distance of the key from the goal",
    "distance": "mean distance of the key from the goal",
    "final": "distance of the key from the goal at the last step",
    "within": "share of steps within the tolerance",
    "deviation": "root mean square distance over all dimensions, in standard deviations",
    "success": "share of episodes that succeeded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """Results of one episode, in the key's unit unless stated. The first state does not count."""

    rms: float
    distance: float
    final: float
    within: float  # 0 to 1
    deviation: float  # in standard deviations of the data
    success: float  # 0 or 1


def distances(states: Floats, table: Floats, key: tuple[int, ...]) -> NDArray[np.float64]:
    """Distances over the key dimensions: [L + 1, S] and at least as many rows -> [L + 1]."""
    offsets = states[:, key].astype(np.float64) - table[: len(states), key]
    return np.asarray(np.sqrt((offsets**2).sum(axis=1)))


def within_tolerance(
    states: Floats, table: Floats, *, key: tuple[int, ...], first: int, tolerance: float
) -> bool:
    """Whether the root mean square distance from step `first` on is at most the tolerance."""
    return _rms(distances(states, table, key)[first:]) <= tolerance


def tracking(
    states: Floats,
    table: Floats,
    *,
    key: tuple[int, ...],
    steps: int,
    tolerance: float,
    std: Floats,
    success: bool,
) -> Tracking:
    """Compare states [L + 1, S] with a table [N + 1 or more, S]; std [S] is that of the data."""
    visited = pad_rows(states, steps + 1)
    errors = distances(visited, table, key)[1:]
    scaled = (visited[1:].astype(np.float64) - table[1 : steps + 1]) / std
    return Tracking(
        rms=_rms(errors),
        distance=float(errors.mean()),
        final=float(errors[-1]),
        within=float((errors <= tolerance).mean()),
        deviation=_rms(scaled),
        success=float(success),
    )


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt((values**2).mean()))
