"""Waypoint tables: row k is the desired state at step k. H rows of a table, S state, L steps.

A state of Hopper, Walker2d and HalfCheetah is [positions, velocities]: height, angles of the body
and of the joints; then the forward speed and the rates of all these. Angles in rad, rates per s.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from m3pc.envs import make
from m3pc.types import Episode, Floats, InputError

CYCLE_STEPS = 1000  # steps in which a wiggle completes `cycles` cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiggle:
    """A hopper that stands with its foot flat and its knee straight, and sways about the ankle.

    Foot and body lean by the same angle: the foot's joint turns against the body's.
    """

    amplitude: float = 0.05  # rad; the first half cycle leans backwards
    height: float = 1.205  # m, body upright; episodes begin 0.045 m higher
    lever: float = 1.15  # m, from the body to the ankle, the centre of rotation
    steps_per_unit: float = 125.0  # steps per unit of time in the rates; 125 of 0.008 s are 1 s
    stretch: float = 1.0  # steps between two rows
    lean: float = 0.0  # added to angles and rates

    def table(self, rows: int, cycles: float) -> Floats:
        """A table [H, 11] with `cycles` cycles in 1000 steps."""
        speed = 2 * np.pi * cycles / CYCLE_STEPS  # rad per step
        phase = speed * self.stretch * np.arange(rows)
        angle = -self.amplitude * np.sin(phase)
        rate = -self.amplitude * np.cos(phase) * speed * self.steps_per_unit
        zeros = np.zeros(rows)
        high, wide = self.lever * np.cos(angle), self.lever * np.sin(angle)
        lean = angle + self.lean
        columns = [self.height - self.lever + high, lean, zeros, zeros, lean]
        columns += [high * rate, -wide * rate, rate + self.lean, zeros, zeros, rate + self.lean]
        return np.stack(columns, axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """One dimension of a state that changes at a constant rate from `first` to `last`."""

    dimension: int
    rate: int  # dimension of its rate
    first: float
    last: float

    def write(self, states: Floats, seconds: float) -> None:
        """Overwrite the dimension and its rate in a table [H, S] whose rows are `seconds` apart."""
        states[:, self.dimension] = np.linspace(self.first, self.last, len(states))
        states[:, self.rate] = (self.last - self.first) / ((len(states) - 1) * seconds)


def apply_ramps(states: Floats, ramps: Sequence[Ramp], *, seconds: float, positions: int) -> Floats:
    """A copy of `states` [L, S] with the ramps, and one more row, at rest.

    seconds    between two rows
    positions  numbers of a state before its velocities
    """
    table = states.copy()
    for ramp in ramps:
        ramp.write(table, seconds)
    rest = table[-1:].copy()
    rest[:, positions:] = 0
    return np.concatenate([table, rest])


def pad_rows(table: Floats, rows: int) -> Floats:
    """The table with its last row repeated until it has `rows` rows; never shortened."""
    return np.pad(table, ((0, max(0, rows - len(table))), (0, 0)), mode="edge")


def simulate_constant_action(
    env: str, action: Sequence[float], *, rows: int, seed: int = 0
) -> Floats:
    """The states [H, S] of an environment that gets the same action at every step."""
    with closing(make(env, max_episode_steps=rows)) as simulator:
        states = [simulator.reset(seed=seed)[0]]
        for _ in range(rows - 1):
            states.append(simulator.step(np.asarray(action, np.float32))[0])
    return np.asarray(states, np.float32)


def episodes_with(episodes: Sequence[Episode], states: int) -> list[int]:
    """The numbers of the episodes that have at least that many states."""
    numbers = [n for n, episode in enumerate(episodes) if len(episode.states) >= states]
    if not numbers:
        raise InputError(
            f"no episode of --data has {states} states, as many as the waypoints need; give the "
            "data set of another policy"
        )
    return numbers


def closest_stretch(
    series: Sequence[Floats], target: NDArray[np.float64]
) -> tuple[int, int, float]:
    """The stretch of several series that is closest to `target` [K].

    Returns the index of the series, its first step, and the root mean square distance. Each series
    has at least K values.
    """

    def closest(values: Floats) -> tuple[float, int]:
        errors = sliding_window_view(values, len(target)).astype(np.float64) - target
        squares = (errors**2).mean(axis=1)
        return float(squares.min()), int(squares.argmin())

    candidates = [closest(values) for values in series]
    best = min(range(len(candidates)), key=lambda n: candidates[n])
    return best, candidates[best][1], math.sqrt(candidates[best][0])
