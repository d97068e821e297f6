"""What a task is. H rows of a waypoint table, S state, L steps of an episode."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from m3pc.core.history import WaypointFn
from m3pc.goals.tracking import near
from m3pc.types import Episode, Floats, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSetting:
    """What waypoints may be made from."""

    rows: int  # H
    cycles: float | None = None  # in 1000 steps, where the task has a frequency
    episodes: Sequence[Episode] = ()  # of the data set
    source: str = "--data"  # what it is called

    def data(self) -> Sequence[Episode]:
        if not self.episodes:
            raise InputError(
                "these waypoints take most dimensions from an episode of a data set; give --data"
            )
        return self.episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class WaypointSource:
    """Waypoints, and where they come from."""

    guide: WaypointFn
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalTask:
    name: str
    env: str
    key: tuple[int, ...]  # dimensions of a state that count
    key_names: tuple[str, ...]  # what they are, with their unit
    steps: int  # of an episode; how near it came is measured over all of them
    judged: int  # the first step that decides success
    tolerance: float  # root mean square distance from there on, in the key's unit
    guides: Mapping[str, Callable[[GoalSetting], WaypointSource]]  # by the value of goal.waypoints
    cycles: tuple[float, ...] = ()  # in 1000 steps; () where the task has no frequency
    succeeded: "Callable[[GoalTask, Floats, Floats], bool]" = field(
        default=lambda task, states, table: near(
            states, table, key=task.key, first=task.judged, tolerance=task.tolerance
        )
    )  # from the states [L + 1, S] of an episode and its waypoints
    success: str = ""  # the rule in words; default: the one above

    @property
    def rule(self) -> str:
        return self.success or (
            f"root mean square distance of {' and '.join(self.key_names)} of at most "
            f"{self.tolerance:g} over steps {self.judged} to {self.steps}"
        )

    def guidance(self, kind: str, setting: GoalSetting) -> WaypointSource:
        if kind not in self.guides:
            known = " or ".join(self.guides)
            raise InputError(f"{self.name} has no waypoints {kind!r}; give --waypoints {known}")
        return self.guides[kind](setting)


def fixed(table: Floats, note: str) -> WaypointSource:
    """The same table for every episode."""
    return WaypointSource(guide=lambda first: table, note=note)
