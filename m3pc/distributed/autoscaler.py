"""How many rollout actors a run should have: more while the learner waits for episodes and the
planner has room, fewer while actors wait for the learner or in the planner's queue.

The number cannot oscillate. Actors are added if the learner needs at most 3/4 of its time for their
data, and removed if they collect twice what the learner can use. A step adds a quarter, at least
one, and so at most doubles their number: they then collect at most 2 · 0.75 < 2 times what the
learner can use. In addition, a number that was too high is not tried again for ten minutes.
"""

from collections import deque
from dataclasses import dataclass

from m3pc.telemetry.catalogue import (
    ACTOR_BLOCKED,
    LEARNER_WAIT,
    PLAN_SECONDS,
    PLANNER_BUSY,
    PLANNER_IDLE,
)
from m3pc.telemetry.recorder import Metric, Snapshot

WINDOW = 30.0  # seconds: the load is averaged over them, and changes are at least so far apart
COOLDOWN = 600.0  # seconds in which a number that was too high is not tried again
STARVED = 0.25  # more actors if the learner waits for episodes for this share of its time
ROOM = 0.7  # ... and planners are busy for at most this share of their time
BLOCKED = 0.5  # fewer actors if they wait for the learner for this share of their time
# Fewer actors, too, if a planner is BUSY and requests queue QUEUED times as long as they compute.
QUEUED, BUSY = 2.0, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorBounds:
    """Limits of the number of actors, inclusive."""

    min_actors: int
    max_actors: int


class Autoscaler:
    def __init__(self, bounds: ActorBounds) -> None:
        self.bounds = bounds
        self._snapshots: deque[tuple[float, Snapshot]] = deque()
        self._too_many: tuple[int, float] | None = None  # number of actors, avoided until

    def decide(self, now: float, snapshot: Snapshot, *, actors: int, running: int) -> int:
        """Return how many actors to run; `actors` are wanted now, and `running` of them work."""
        inside = min(max(actors, self.bounds.min_actors), self.bounds.max_actors)
        if inside != actors or running != actors:  # the load of a changing fleet says nothing
            self._snapshots.clear()
            return inside
        self._snapshots.append((now, snapshot))
        while len(self._snapshots) > 2 and self._snapshots[1][0] <= now - WINDOW:
            self._snapshots.popleft()
        if now - self._snapshots[0][0] < WINDOW:
            return actors
        wanted = self._adjusted(now, actors)
        if wanted != actors:
            self._snapshots.clear()
        return wanted

    def _adjusted(self, now: float, actors: int) -> int:
        """The number of actors that fits the load of the last WINDOW."""
        (begin, before), (end, after) = self._snapshots[0], self._snapshots[-1]

        def growth(metric: Metric, label: str = "") -> float:
            return max(0.0, _total(after, metric, label) - _total(before, metric, label))

        starved = growth(LEARNER_WAIT, "limiter") / (end - begin)
        blocked = growth(ACTOR_BLOCKED, "replay") / (end - begin) / max(actors, 1)
        working, idle = growth(PLANNER_BUSY), growth(PLANNER_IDLE)
        busy = working / (working + idle) if working + idle else 0.0
        computing = growth(PLAN_SECONDS, "compute")
        queued = growth(PLAN_SECONDS, "queue") / computing if computing else 0.0

        step = max(1, actors // 4)
        if blocked >= BLOCKED or (busy >= BUSY and queued >= QUEUED):
            self._too_many = (actors, now + COOLDOWN)
            return max(self.bounds.min_actors, actors - step)
        if starved >= STARVED and busy <= ROOM:
            ceiling = self.bounds.max_actors
            if self._too_many is not None and now < self._too_many[1]:
                ceiling = min(ceiling, max(actors, self._too_many[0] - 1))
            return min(ceiling, actors + step)
        return actors


def _total(snapshot: Snapshot, metric: Metric, label: str) -> float:
    """The value of a counter, or the sum of a histogram's observations."""
    return snapshot.get(metric.name, {}).get(label, [0.0])[-1]
