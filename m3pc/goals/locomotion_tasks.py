"""Tasks of Hopper, Walker2d and HalfCheetah, in the physics of D4RL. H rows of a table, S state."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from m3pc.core.env_ids import join_env_name
from m3pc.goals.task import GoalSetting, GoalTask, WaypointSource, fixed
from m3pc.goals.waypoints import (
    Ramp,
    Wiggle,
    apply_ramps,
    closest_stretch,
    episodes_with,
    pad_rows,
    simulate_constant_action,
)
from m3pc.types import Floats, InputError

NO_TERMINATION = {"terminate_when_unhealthy": False}  # an episode goes on in any posture
HOPPER = join_env_name("d4rl/Hopper-v2", NO_TERMINATION)
WALKER = join_env_name("d4rl/Walker2d-v2", NO_TERMINATION)
CHEETAH = "d4rl/HalfCheetah-v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps of a recorded episode that are closest to a ramp."""

    states: Floats  # [steps + 1, S]
    episode: int
    start: int  # first step, within the episode
    ramp: Ramp
    error: float  # root mean square distance to the ramp, in the dimension's unit


def _closest(setting: GoalSetting, ramps: Sequence[Ramp], steps: int, *, at_start: bool) -> Stretch:
    """The stretch of the data in which a dimension changes most like one of the ramps.

    ramps     alternatives for one dimension
    at_start  the stretch must begin at an episode's first step
    """
    episodes = setting.data()
    numbers = episodes_with(episodes, steps + 1)
    stop = steps + 1 if at_start else None
    series = [episodes[n].states[:stop, ramps[0].dimension] for n in numbers]
    candidates = [
        (closest_stretch(series, np.linspace(ramp.first, ramp.last, steps + 1)), ramp)
        for ramp in ramps
    ]
    (which, start, error), ramp = min(candidates, key=lambda candidate: candidate[0][2])
    episode = numbers[which]
    states = episodes[episode].states[start : start + steps + 1]
    return Stretch(states=states, episode=episode, start=start, ramp=ramp, error=error)


# Hopper

SLOWEST = 0.001  # cycles: a hopper that stands


def _wiggle(wiggle: Wiggle, note: str, setting: GoalSetting) -> WaypointSource:
    assert setting.cycles is not None
    return fixed(wiggle.table(setting.rows, setting.cycles), note)


def _released_wiggle(setting: GoalSetting) -> WaypointSource:
    """The authors' released waypoints.

    The body is as high as at an episode's start and turns about the ground. Time runs from 0 to
    1000 in 1000 rows. Rates are ten times the change per step. The slowest wiggle leans a little.
    """
    lean = -0.02 if setting.cycles == SLOWEST else 0.0
    wiggle = Wiggle(height=1.25, lever=1.25, steps_per_unit=10.0, stretch=1000 / 999, lean=lean)
    return _wiggle(wiggle, "foot and torso sinusoidal, rates as released", setting)


_paper_wiggle = partial(
    _wiggle,
    Wiggle(),
    "foot joint sinusoidal, the other two at rest; torso and rates follow from a flat foot",
)

# Walker2d

SPLIT_STEPS = 120  # steps in which the thigh is raised
THIGH = Ramp(dimension=2, rate=11, first=0.0, last=-2.6)  # nearly to the joint's limit


def _paper_split(setting: GoalSetting) -> WaypointSource:
    """The thigh follows a ramp; the other dimensions are from the recorded episode whose thigh
    begins most like the ramp, so that they fit the movement."""
    stretch = _closest(setting, [THIGH], SPLIT_STEPS, at_start=True)
    table = apply_ramps(stretch.states, [THIGH], seconds=0.008, positions=8)
    note = (
        f"thigh from 0 to {THIGH.last:g} rad in {SPLIT_STEPS} steps, the rest from episode "
        f"{stretch.episode} of {setting.source}, whose thigh goes most like that (off by "
        f"{stretch.error:.2f} rad); then at rest"
    )
    return fixed(pad_rows(table, setting.rows), note)


def _released_split(setting: GoalSetting) -> WaypointSource:
    action = (-0.5, 0.2, 0.0, 0.5, 0.2, -0.3)
    table = simulate_constant_action(WALKER, action, rows=setting.rows)
    return fixed(table, f"simulated under the constant action {list(action)}")


# HalfCheetah

FLIP_STEPS = 70  # steps in which the body turns over
SINK = Ramp(dimension=0, rate=9, first=0.0, last=-0.5)  # m
ANGLE, ANGLE_RATE = 1, 10  # dimensions of the body's angle and its rate
FLIP_ANGLE = 3.0  # rad by which the body has turned in a recorded flip
STEPS_AFTER_FLIP = 20  # steps that a recorded flip goes on after FLIP_ANGLE
WAIT_ROWS = 30  # rows before the released flip


def _paper_flip(setting: GoalSetting) -> WaypointSource:
    """Height and angle follow ramps; the other dimensions are from the stretch of the data in which
    the body turns most like the ramp, in either direction, so that they fit the movement."""
    turns = [
        Ramp(dimension=ANGLE, rate=ANGLE_RATE, first=0.0, last=last) for last in (np.pi, -np.pi)
    ]
    stretch = _closest(setting, turns, FLIP_STEPS, at_start=False)
    table = apply_ramps(stretch.states, [SINK, stretch.ramp], seconds=0.05, positions=8)
    note = (
        f"height from 0 to {SINK.last:g} m and angle from 0 to {stretch.ramp.last:.2f} rad in "
        f"{FLIP_STEPS} steps, the rest from steps {stretch.start} to "
        f"{stretch.start + FLIP_STEPS} of episode {stretch.episode} of {setting.source}, which "
        f"turns most like that (off by {stretch.error:.2f} rad); then at rest"
    )
    return fixed(pad_rows(table, setting.rows), note)


def _released_flip(setting: GoalSetting) -> WaypointSource:
    """The authors' released ramps, on the episode of the data with the lowest return."""
    episodes = setting.data()
    numbers = episodes_with(episodes, WAIT_ROWS + FLIP_STEPS)
    lowest = min(numbers, key=lambda n: float(episodes[n].rewards.sum(dtype=np.float64)))
    table = episodes[lowest].states[: WAIT_ROWS + FLIP_STEPS].copy()
    table[:WAIT_ROWS, :2] = 0.0, 0.5
    table[WAIT_ROWS:, 0] = np.linspace(0.0, -0.5, FLIP_STEPS)
    table[WAIT_ROWS:, 1] = np.linspace(0.5, -3.14, FLIP_STEPS)
    note = (
        f"height from 0 to -0.5 m and angle from 0.5 to -3.14 rad in rows {WAIT_ROWS} to "
        f"{WAIT_ROWS + FLIP_STEPS - 1}, the rest from episode {lowest} of {setting.source}, of the "
        "lowest return, in place of the released one's"
    )
    return fixed(pad_rows(table, setting.rows), note)


def _recorded_flip(setting: GoalSetting) -> WaypointSource:
    """Among recorded episodes that turn over, the one whose first state is closest."""
    flips = [
        (episode.states[0], episode.states[: over[0] + STEPS_AFTER_FLIP + 1])
        for episode in setting.data()
        if len(over := np.flatnonzero(np.abs(episode.states[:, ANGLE]) >= FLIP_ANGLE))
    ]
    if not flips:
        raise InputError(
            f"no episode of --data turns over (by {FLIP_ANGLE:g} rad); give a data set with some, "
            "such as one of --quality babble"
        )
    starts = np.stack([first for first, _ in flips])

    def waypoints(first: Floats) -> Floats:
        return flips[int(np.linalg.norm(starts - first, axis=1).argmin())][1]

    note = (
        f"of {len(flips)} episodes of {setting.source} that turn over, the one that begins "
        f"nearest, until {STEPS_AFTER_FLIP} steps after it has turned by {FLIP_ANGLE:g} rad"
    )
    return WaypointSource(waypoints=waypoints, note=note)


LOCOMOTION_TASKS = (
    GoalTask(
        name="hopper-wiggle",
        env=HOPPER,
        key=(1,),
        key_names=("torso angle, rad",),
        steps=1000,
        judged_from=1,
        tolerance=0.025,  # half the amplitude; a hopper that stands still is off by 0.035
        waypoint_sources={"paper": _paper_wiggle, "released": _released_wiggle},
        cycles=(SLOWEST, 2.0, 6.0),
    ),
    GoalTask(
        name="walker-split",
        env=WALKER,
        key=(2,),
        key_names=("thigh angle, rad",),
        steps=300,
        judged_from=200,
        tolerance=0.3,
        waypoint_sources={"paper": _paper_split, "released": _released_split},
    ),
    GoalTask(
        name="cheetah-flip",
        env=CHEETAH,
        key=(1,),
        key_names=("body angle, rad",),
        steps=200,
        judged_from=150,
        tolerance=0.5,
        waypoint_sources={
            "paper": _paper_flip,
            "released": _released_flip,
            "recorded": _recorded_flip,
        },
    ),
)
