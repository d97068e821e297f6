"""Goal tasks. H rows of a waypoint table, S state, L steps of an episode."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from m3pc.core.history import WaypointFn
from m3pc.goals.tracking import within_tolerance
from m3pc.types import Episode, Floats, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSetting:
    """The inputs from which waypoints are made."""

    rows: int  # H
    cycles: float | None = None  # per 1000 steps, where the task has a frequency
    episodes: Sequence[Episode] = ()  # the data set's
    source: str = "--data"  # name of the data set

    def data(self) -> Sequence[Episode]:
        if not self.episodes:
            raise InputError(
                "these waypoints take most dimensions from an episode of a data set; give --data"
            )
        return self.episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class WaypointSource:
    """Waypoints, and a note that says where they come from."""

    waypoints: WaypointFn
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalTask:
    """States to reach in an environment, and the rule of success."""

    name: str
    env: str
    key: tuple[int, ...]  # dimensions of a state that are compared with the goal
    key_names: tuple[str, ...]  # their names and units
    steps: int  # length of an episode; distances are measured over all steps
    judged_from: int  # the first step that counts for success
    tolerance: float  # largest root mean square distance from that step on, in the key's unit
    waypoint_sources: Mapping[
        str, Callable[[GoalSetting], WaypointSource]
    ]  # by the value of goal.waypoints
    cycles: tuple[float, ...] = ()  # per 1000 steps; () where the task has no frequency
    succeeded: "Callable[[GoalTask, Floats, Floats], bool]" = field(
        default=lambda task, states, table: within_tolerance(
            states, table, key=task.key, first=task.judged_from, tolerance=task.tolerance
        )
    )  # takes the task, an episode's states [L + 1, S] and its waypoints
    success: str = ""  # the rule in words; empty: the default rule above

    @property
    def success_rule(self) -> str:
        """The rule of success, in words."""
        return self.success or (
            f"root mean square distance of {' and '.join(self.key_names)} of at most "
            f"{self.tolerance:g} over steps {self.judged_from} to {self.steps}"
        )

    def waypoints(self, kind: str, setting: GoalSetting) -> WaypointSource:
        """Waypoints of one kind: a value of `goal.waypoints`."""
        if kind not in self.waypoint_sources:
            known = " or ".join(self.waypoint_sources)
            raise InputError(f"{self.name} has no waypoints {kind!r}; give --waypoints {known}")
        return self.waypoint_sources[kind](setting)


def fixed(table: Floats, note: str) -> WaypointSource:
    """The same table for every episode."""
    return WaypointSource(waypoints=lambda first: table, note=note)
