"""Tasks of PickPlaceCan: guides are episodes of a data set. H rows of a table, S state, L steps.

A state is the hand's place [3] and quaternion [4], two fingers [2], the can's place [3]; then,
where the environment tells all of the can, its quaternion [4], and its place [3] and quaternion [4]
as the hand sees it. Metres; z points up, y from the first bin to the second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from m3pc.core.manipulation_tasks import FLOOR
from m3pc.goals.quaternions import applied, composed, inverse
from m3pc.goals.task import GoalSetting, GoalTask, WaypointSource
from m3pc.types import Episode, Floats, InputError

ENV = "robosuite/PickPlaceCan"
HAND, TURNED, CAN, SEEN = slice(0, 3), slice(3, 7), slice(9, 12), slice(16, 19)
CAN_TURNED, SEEN_TURNED = slice(12, 16), slice(19, 23)
ACROSS = 1  # y
MOVED = 0.01  # the can has left its place


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One of the four of the second bin."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    def holds(self, place: Floats) -> bool:
        return bool((place > self.low).all() and (place < self.high).all())


# As robosuite has them: the bin's centre is (0.1, 0.28), its sides 0.39 and 0.49, its floor at 0.8.
CORRECT = Box(low=(0.1, 0.28, 0.8), high=(0.295, 0.525, 0.9))
NEARER = Box(low=(0.1, 0.035, 0.8), high=(0.295, 0.28, 0.9))


def fell(states: Floats) -> bool:
    """Whether the can ended beside the bins."""
    return bool(states[-1, CAN][2] < FLOOR)


def lies_in(box: Box, states: Floats) -> bool:
    return box.holds(states[-1, CAN])


def shortened(states: Floats, share: float) -> Floats:
    """The way of the can [L + 1, S] across, from its first place, made that much as long.

    From when the can leaves its place the hand goes with it; what the hand sees follows.
    """
    table = states.copy()
    first = states[0, CAN]
    away = np.flatnonzero(np.linalg.norm(states[:, CAN] - first, axis=1) > MOVED)
    rows = table[away[0] :] if len(away) else table[:0]
    for part in (HAND, CAN):
        place = rows[:, part]
        place[:, ACROSS] = first[ACROSS] + share * (place[:, ACROSS] - first[ACROSS])
    if states.shape[1] >= SEEN.stop:
        rows[:, SEEN] = _seen(rows)
    return table


def _seen(states: Floats) -> NDArray[np.float64]:
    """The can's place in the hand's frame: [N, 3]"""
    apart = states[:, CAN].astype(np.float64) - states[:, HAND]
    return applied(inverse(states[:, TURNED]), apart)


def begun_at(states: Floats, first: Floats) -> Floats:
    """The same way [L + 1, S], begun with the can where and as it is in the state `first` [S].

    Hand and can are moved sideways: a hand that grasped where another can was would miss this one.
    A can is round, so it may as well be turned about itself from the start: a goal in which it is
    turned otherwise than it lies cannot be reached.
    """
    table = states.copy()
    aside = np.append((first[CAN] - states[0, CAN])[:2], 0).astype(np.float32)
    for part in (HAND, CAN):
        table[:, part] += aside
    if states.shape[1] >= SEEN_TURNED.stop:
        spin = composed(inverse(states[0, CAN_TURNED]), first[CAN_TURNED])
        table[:, CAN_TURNED] = composed(states[:, CAN_TURNED], spin)
        seen = composed(states[:, SEEN_TURNED], spin)
        table[:, SEEN_TURNED] = np.where(seen[:, 3:] < 0, -seen, seen)  # as robosuite shows it
    return table


def to_nearer(states: Floats) -> Floats:
    """The same to the middle of the nearer box."""
    start, end = states[0, CAN][ACROSS], states[-1, CAN][ACROSS]
    middle = (NEARER.low[ACROSS] + NEARER.high[ACROSS]) / 2
    return shortened(states, (middle - start) / (end - start))


def _nearest(
    wanted: Callable[[Floats], bool],
    change: Callable[[Floats], Floats],
    what: str,
    setting: GoalSetting,
) -> WaypointSource:
    """The episode of the wanted kind in which the can first lies nearest to where it does now,
    moved there."""
    chosen = _chosen(setting.data(), wanted, what)
    places = np.stack([states[0, CAN] for states in chosen])

    def guide(first: Floats) -> Floats:
        nearest = int(np.linalg.norm(places - first[CAN], axis=1).argmin())
        return change(begun_at(chosen[nearest], first))

    note = (
        f"of {len(chosen)} episodes of {setting.source} in which the can {what}, the one whose can "
        "first lies nearest, moved and turned to where and as it lies now"
    )
    return WaypointSource(guide=guide, note=note)


def _chosen(
    episodes: Sequence[Episode], wanted: Callable[[Floats], bool], what: str
) -> list[Floats]:
    found = [episode.states for episode in episodes if wanted(episode.states)]
    if not found:
        raise InputError(
            f"none of the {len(episodes)} episodes of --data is one in which the can {what}; give "
            "the data set of a policy that does so"
        )
    return found


def _as_it_is(states: Floats) -> Floats:
    return states


def _task(
    name: str,
    *,
    guide: Callable[[GoalSetting], WaypointSource],
    succeeded: Callable[[Floats], bool],
    success: str,
) -> GoalTask:
    return GoalTask(
        name=name,
        env=ENV,
        key=(9, 10, 11),
        key_names=("can x, m", "can y, m", "can z, m"),
        steps=400,
        judged=400,
        tolerance=0.05,
        guides={"paper": guide},
        succeeded=lambda task, states, table: succeeded(states),
        success=success,
    )


_placed = partial(lies_in, CORRECT)
CANS = (
    _task(
        "can-throw",
        guide=partial(_nearest, fell, _as_it_is, "ends beside the bins"),
        succeeded=fell,
        success=f"the can ends beside the bins, below {FLOOR} m",
    ),
    _task(
        "can-place",
        guide=partial(_nearest, _placed, _as_it_is, "ends in its box"),
        succeeded=_placed,
        success="the can ends in its box",
    ),
    _task(
        "can-nearer",
        guide=partial(_nearest, _placed, to_nearer, "ends in its box"),
        succeeded=partial(lies_in, NEARER),
        success="the can ends in the box before its own",
    ),
)
