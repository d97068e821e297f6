"""Tasks of PickPlaceCan: waypoints are episodes of a data set. H rows of a table, S state, L steps.

A state is the hand's position [3] and quaternion [4], two fingers [2], the can's position [3];
then, unless the environment limits what is observed of the can, its quaternion [4], and its
position [3] and quaternion [4] in the hand's frame. Metres; z points up, y from the first bin to
the second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from m3pc.core.manipulation_tasks import FLOOR
from m3pc.goals.quaternions import compose, inverse, rotate
from m3pc.goals.task import GoalSetting, GoalTask, WaypointSource
from m3pc.types import Floats, InputError

ENV = "robosuite/PickPlaceCan"
HAND_POSITION, HAND_ROTATION = slice(0, 3), slice(3, 7)
CAN_POSITION, CAN_ROTATION = slice(9, 12), slice(12, 16)
CAN_IN_HAND, CAN_ROTATION_IN_HAND = slice(16, 19), slice(19, 23)
Y = 1
MIN_MOVE = 0.01  # metres from its first position beyond which the can counts as moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One of the four compartments of the second bin."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    def contains(self, position: Floats) -> bool:
        return bool((position > self.low).all() and (position < self.high).all())


# robosuite's values: the bin's centre is (0.1, 0.28), its sides 0.39 and 0.49, its floor at 0.8.
CAN_BOX = Box(low=(0.1, 0.28, 0.8), high=(0.295, 0.525, 0.9))
NEARER_BOX = Box(low=(0.1, 0.035, 0.8), high=(0.295, 0.28, 0.9))


def is_beside_bins(states: Floats) -> bool:
    """Whether the can ended on the floor."""
    return bool(states[-1, CAN_POSITION][2] < FLOOR)


def is_in_box(box: Box, states: Floats) -> bool:
    """Whether the can ended in the box."""
    return box.contains(states[-1, CAN_POSITION])


def scale_path(states: Floats, factor: float) -> Floats:
    """A copy of [L + 1, S] in which the can moves `factor` times as far in y.

    The hand moves with it from the step at which the can leaves its first position.
    """
    table = states.copy()
    first = states[0, CAN_POSITION]
    moved = np.flatnonzero(np.linalg.norm(states[:, CAN_POSITION] - first, axis=1) > MIN_MOVE)
    rows = table[moved[0] :] if len(moved) else table[:0]
    for columns in (HAND_POSITION, CAN_POSITION):
        positions = rows[:, columns]
        positions[:, Y] = first[Y] + factor * (positions[:, Y] - first[Y])
    if states.shape[1] >= CAN_IN_HAND.stop:
        rows[:, CAN_IN_HAND] = can_in_hand(rows)
    return table


def can_in_hand(states: Floats) -> NDArray[np.float64]:
    """The can's position in the hand's frame: [N, 3]"""
    offset = states[:, CAN_POSITION].astype(np.float64) - states[:, HAND_POSITION]
    return rotate(inverse(states[:, HAND_ROTATION]), offset)


def move_to_start(states: Floats, first: Floats) -> Floats:
    """A copy of [L + 1, S], shifted and turned so that the can begins as in the state `first` [S].

    Hand and can are shifted sideways together, or the hand would miss the can. The can is
    turned about its own axis from the start: it is round, so the grasp stays the same, and a goal
    with another turn could not be reached.
    """
    table = states.copy()
    shift = np.append((first[CAN_POSITION] - states[0, CAN_POSITION])[:2], 0).astype(np.float32)
    for columns in (HAND_POSITION, CAN_POSITION):
        table[:, columns] += shift
    if states.shape[1] >= CAN_ROTATION_IN_HAND.stop:
        turn = compose(inverse(states[0, CAN_ROTATION]), first[CAN_ROTATION])
        table[:, CAN_ROTATION] = compose(states[:, CAN_ROTATION], turn)
        in_hand = compose(states[:, CAN_ROTATION_IN_HAND], turn)
        # robosuite returns the sign with a scalar of 0 or more
        table[:, CAN_ROTATION_IN_HAND] = np.where(in_hand[:, 3:] < 0, -in_hand, in_hand)
    return table


def end_in_nearer_box(states: Floats) -> Floats:
    """The same path, scaled so that it ends in the middle of the nearer box."""
    start, end = states[0, CAN_POSITION][Y], states[-1, CAN_POSITION][Y]
    middle = (NEARER_BOX.low[Y] + NEARER_BOX.high[Y]) / 2
    return scale_path(states, (middle - start) / (end - start))


def _nearest_episode(
    is_wanted: Callable[[Floats], bool],
    change: Callable[[Floats], Floats],
    what: str,
    setting: GoalSetting,
) -> WaypointSource:
    """Among the episodes with the wanted end (`what`, in words), the waypoints take the one whose
    can begins nearest, move it to the current can and then apply `change`."""
    data = setting.data()
    episodes = [episode.states for episode in data if is_wanted(episode.states)]
    if not episodes:
        raise InputError(
            f"none of the {len(data)} episodes of --data is one in which the can {what}; give "
            "the data set of a policy that does so"
        )
    starts = np.stack([states[0, CAN_POSITION] for states in episodes])

    def waypoints(first: Floats) -> Floats:
        nearest = int(np.linalg.norm(starts - first[CAN_POSITION], axis=1).argmin())
        return change(move_to_start(episodes[nearest], first))

    note = (
        f"of {len(episodes)} episodes of {setting.source} in which the can {what}, the one whose "
        "can first lies nearest, moved and turned to where and as it lies now"
    )
    return WaypointSource(waypoints=waypoints, note=note)


def _unchanged(states: Floats) -> Floats:
    return states


def _task(
    name: str,
    *,
    source: Callable[[GoalSetting], WaypointSource],
    succeeded: Callable[[Floats], bool],
    success: str,
) -> GoalTask:
    return GoalTask(
        name=name,
        env=ENV,
        key=(9, 10, 11),
        key_names=("can x, m", "can y, m", "can z, m"),
        steps=400,
        judged_from=400,
        tolerance=0.05,
        waypoint_sources={"paper": source},
        succeeded=lambda task, states, table: succeeded(states),
        success=success,
    )


_is_placed = partial(is_in_box, CAN_BOX)
CAN_TASKS = (
    _task(
        "can-throw",
        source=partial(_nearest_episode, is_beside_bins, _unchanged, "ends beside the bins"),
        succeeded=is_beside_bins,
        success=f"the can ends beside the bins, below {FLOOR} m",
    ),
    _task(
        "can-place",
        source=partial(_nearest_episode, _is_placed, _unchanged, "ends in its box"),
        succeeded=_is_placed,
        success="the can ends in its box",
    ),
    _task(
        "can-nearer",
        source=partial(_nearest_episode, _is_placed, end_in_nearer_box, "ends in its box"),
        succeeded=partial(is_in_box, NEARER_BOX),
        success="the can ends in the box before its own",
    ),
)
