"""Waypoint tables: row k is the state that is wanted at step k. H rows, S state, L steps.

A state of Hopper, Walker2d and HalfCheetah is [positions, velocities]: height, angle of the body
and of the joints; then the speed forwards and the rates of all these. Angles in rad, rates per s.
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

CYCLE = 1000  # steps in which a wiggle has its number of cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiggle:
    """A hopper that stands with its foot flat and its knee straight, and sways about the ankle.

    Foot and body then lean by the same angle: the foot's joint turns against the body's.
    """

    amplitude: float = 0.05  # rad; the first half cycle leans backwards
    height: float = 1.205  # m, of the body that stands upright; episodes begin 0.045 above that
    lever: float = 1.15  # m, from what it turns about, the ankle
    steps_per_unit: float = 125.0  # of time in the rates: steps of 0.008 s
    stretch: float = 1.0  # steps between two rows
    lean: float = 0.0  # added to angles and rates

    def table(self, rows: int, cycles: float) -> Floats:
        """[H, 11] with as many cycles in 1000 steps."""
        pace = 2 * np.pi * cycles / CYCLE  # rad a step
        phase = pace * self.stretch * np.arange(rows)
        angle = -self.amplitude * np.sin(phase)
        rate = -self.amplitude * np.cos(phase) * pace * self.steps_per_unit
        none = np.zeros(rows)
        high, wide = self.lever * np.cos(angle), self.lever * np.sin(angle)
        lean = angle + self.lean
        columns = [self.height - self.lever + high, lean, none, none, lean]
        columns += [high * rate, -wide * rate, rate + self.lean, none, none, rate + self.lean]
        return np.stack(columns, axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """One dimension that goes evenly from one value to another."""

    dimension: int
    rate: int  # dimension of its rate
    first: float
    last: float

    def write(self, states: Floats, seconds: float) -> None:
        """Over all rows of a table [H, S], `seconds` apart."""
        states[:, self.dimension] = np.linspace(self.first, self.last, len(states))
        states[:, self.rate] = (self.last - self.first) / ((len(states) - 1) * seconds)


def ramped(states: Floats, ramps: Sequence[Ramp], *, seconds: float, positions: int) -> Floats:
    """A table that follows `states` [L, S] but for the ramps, and at its end stands still there."""
    table = states.copy()
    for ramp in ramps:
        ramp.write(table, seconds)
    rest = table[-1:].copy()
    rest[:, positions:] = 0
    return np.concatenate([table, rest])


def held(table: Floats, rows: int) -> Floats:
    """The table with its last row repeated until there are as many."""
    return np.pad(table, ((0, max(0, rows - len(table))), (0, 0)), mode="edge")


def constant_action(env: str, action: Sequence[float], *, rows: int, seed: int = 0) -> Floats:
    """The states [H, S] of an environment that gets the same action at every step."""
    with closing(make(env, max_episode_steps=rows)) as made:
        states = [made.reset(seed=seed)[0]]
        for _ in range(rows - 1):
            states.append(made.step(np.asarray(action, np.float32))[0])
    return np.asarray(states, np.float32)


def total_return(episode: Episode) -> float:
    return float(episode.rewards.sum(dtype=np.float64))


def long_enough(episodes: Sequence[Episode], states: int) -> list[int]:
    """The numbers of the episodes that have as many states."""
    found = [number for number, episode in enumerate(episodes) if len(episode.states) >= states]
    if not found:
        raise InputError(
            f"no episode of --data has {states} states, as many as the waypoints need; give the "
            "data set of another policy"
        )
    return found


def alongside(episodes: Sequence[Floats], wanted: NDArray[np.float64]) -> tuple[int, int, float]:
    """Of several series [L + 1] the stretch that goes most like `wanted` [K]: which series, from
    which step on, and how far apart they are (root mean square). All are at least as long."""

    def nearest(series: Floats) -> tuple[float, int]:
        apart = sliding_window_view(series, len(wanted)).astype(np.float64) - wanted
        squares = (apart**2).mean(axis=1)
        return float(squares.min()), int(squares.argmin())

    found = [nearest(series) for series in episodes]
    which = min(range(len(found)), key=lambda n: found[n])
    return which, found[which][1], math.sqrt(found[which][0])
