"""Tasks of Hopper, Walker2d and HalfCheetah, in the physics of D4RL. H rows of a table, S state."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from m3pc.core.env_ids import named
from m3pc.goals.guides import (
    Ramp,
    Wiggle,
    alongside,
    constant_action,
    held,
    long_enough,
    ramped,
    total_return,
)
from m3pc.goals.task import GoalSetting, GoalTask, WaypointSource, fixed
from m3pc.types import Episode, Floats, InputError

FALLING = {"terminate_when_unhealthy": False}  # an episode goes on, whatever the robot's posture
HOPPER, WALKER = named("d4rl/Hopper-v2", FALLING), named("d4rl/Walker2d-v2", FALLING)
CHEETAH = "d4rl/HalfCheetah-v2"

# Hopper

SLOWEST = 0.001  # cycles: a hopper that stands


def _wiggle(wiggle: Wiggle, note: str, setting: GoalSetting) -> WaypointSource:
    assert setting.cycles is not None
    return fixed(wiggle.table(setting.rows, setting.cycles), note)


def _released_wiggle(setting: GoalSetting) -> WaypointSource:
    """It is as high as where episodes begin and turns about the ground; its time runs from 0 to
    1000 in 1000 rows, its rates are ten times those of a step; the file for the slowest leans a
    little."""
    lean = -0.02 if setting.cycles == SLOWEST else 0.0
    wiggle = Wiggle(height=1.25, lever=1.25, steps_per_unit=10.0, stretch=1000 / 999, lean=lean)
    return _wiggle(wiggle, "foot and torso sinusoidal, rates as released", setting)


_paper_wiggle = partial(
    _wiggle,
    Wiggle(),
    "foot joint sinusoidal, the other two at rest; torso and rates follow from a flat foot",
)

# Walker2d

STRIDE = 120  # steps in which the thigh is raised
THIGH = Ramp(dimension=2, rate=11, first=0.0, last=-2.6)  # nearly to the joint's end


def _paper_split(setting: GoalSetting) -> WaypointSource:
    """Along the episode of the data whose thigh first goes most as it should: what the other joints
    do there goes with it, and so does how it ends."""
    episodes = setting.data()
    usable = long_enough(episodes, STRIDE + 1)
    angles = [episodes[n].states[: STRIDE + 1, THIGH.dimension] for n in usable]
    which, _, apart = alongside(angles, np.linspace(THIGH.first, THIGH.last, STRIDE + 1))
    states = episodes[usable[which]].states[: STRIDE + 1]
    table = ramped(states, [THIGH], seconds=0.008, positions=8)
    note = (
        f"thigh from 0 to {THIGH.last:g} rad in {STRIDE} steps, the rest from episode "
        f"{usable[which]} of {setting.source}, whose thigh goes most like that (off by "
        f"{apart:.2f} rad); then at rest"
    )
    return fixed(held(table, setting.rows), note)


def _released_split(setting: GoalSetting) -> WaypointSource:
    action = (-0.5, 0.2, 0.0, 0.5, 0.2, -0.3)
    table = constant_action(WALKER, action, rows=setting.rows)
    return fixed(table, f"simulated under the constant action {list(action)}")


# HalfCheetah

FLIP = 70  # steps in which the body turns over
SINK = Ramp(dimension=0, rate=9, first=0.0, last=-0.5)  # m
TURN, TURN_RATE = 1, 10  # dimensions of the body's angle and its rate
OVER, AFTER = 3.0, 20  # rad by which a recorded flip has turned, and steps in which it comes to lie
WAIT = 30  # rows before the released flip


def _lowest_return(episodes: Sequence[Episode], among: Sequence[int]) -> int:
    return min(among, key=lambda n: total_return(episodes[n]))


def _paper_flip(setting: GoalSetting) -> WaypointSource:
    """Along the stretch of the data in which the body turns most as it should, one way or the
    other: what the joints do there goes with it."""
    episodes = setting.data()
    usable = long_enough(episodes, FLIP + 1)
    angles = [episodes[n].states[:, TURN] for n in usable]
    ways = [Ramp(dimension=TURN, rate=TURN_RATE, first=0.0, last=way) for way in (np.pi, -np.pi)]
    found = [alongside(angles, np.linspace(way.first, way.last, FLIP + 1)) for way in ways]
    (which, start, apart), turn = min(zip(found, ways, strict=True), key=lambda pair: pair[0][2])
    states = episodes[usable[which]].states[start : start + FLIP + 1]
    table = ramped(states, [SINK, turn], seconds=0.05, positions=8)
    note = (
        f"height from 0 to {SINK.last:g} m and angle from 0 to {turn.last:.2f} rad in {FLIP} "
        f"steps, the rest from steps {start} to {start + FLIP} of episode {usable[which]} of "
        f"{setting.source}, which turns most like that (off by {apart:.2f} rad); then at rest"
    )
    return fixed(held(table, setting.rows), note)


def _released_flip(setting: GoalSetting) -> WaypointSource:
    episodes = setting.data()
    chosen = _lowest_return(episodes, long_enough(episodes, WAIT + FLIP))
    table = episodes[chosen].states[: WAIT + FLIP].copy()
    table[:WAIT, :2] = 0.0, 0.5
    table[WAIT:, 0] = np.linspace(0.0, -0.5, FLIP)
    table[WAIT:, 1] = np.linspace(0.5, -3.14, FLIP)
    note = (
        f"height from 0 to -0.5 m and angle from 0.5 to -3.14 rad in rows {WAIT} to "
        f"{WAIT + FLIP - 1}, the rest from episode {chosen} of {setting.source}, of the lowest "
        "return, in place of the released one's"
    )
    return fixed(held(table, setting.rows), note)


def _recorded_flip(setting: GoalSetting) -> WaypointSource:
    """What the data did, unchanged: of the episodes that turn over, the one that begins most like
    the present one."""
    turned = [
        (episode.states[0], episode.states[: over[0] + AFTER + 1])
        for episode in setting.data()
        if len(over := np.flatnonzero(np.abs(episode.states[:, TURN]) >= OVER))
    ]
    if not turned:
        raise InputError(
            f"no episode of --data turns over (by {OVER:g} rad); give a data set with some, such "
            "as one of --quality babble"
        )
    starts = np.stack([first for first, _ in turned])

    def guide(first: Floats) -> Floats:
        return turned[int(np.linalg.norm(starts - first, axis=1).argmin())][1]

    note = (
        f"of {len(turned)} episodes of {setting.source} that turn over, the one that begins "
        f"nearest, until {AFTER} steps after it has turned by {OVER:g} rad"
    )
    return WaypointSource(guide=guide, note=note)


LOCOMOTION = (
    GoalTask(
        name="hopper-wiggle",
        env=HOPPER,
        key=(1,),
        key_names=("torso angle, rad",),
        steps=1000,
        judged=1,
        tolerance=0.025,  # half the amplitude; whoever stands still is off by 0.035
        guides={"paper": _paper_wiggle, "released": _released_wiggle},
        cycles=(SLOWEST, 2.0, 6.0),
    ),
    GoalTask(
        name="walker-split",
        env=WALKER,
        key=(2,),
        key_names=("thigh angle, rad",),
        steps=300,
        judged=200,
        tolerance=0.3,
        guides={"paper": _paper_split, "released": _released_split},
    ),
    GoalTask(
        name="cheetah-flip",
        env=CHEETAH,
        key=(1,),
        key_names=("body angle, rad",),
        steps=200,
        judged=150,
        tolerance=0.5,
        guides={"paper": _paper_flip, "released": _released_flip, "recorded": _recorded_flip},
    ),
)
