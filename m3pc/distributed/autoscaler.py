"""How many rollout actors a run should have: more while the learner waits for what they collect and
the planner has room, fewer while they wait for the learner or in the planner's queue.

It cannot oscillate. Between the thresholds for more and for fewer there is room for the largest
step: adding a quarter (of few actors: one, at most half) to actors that the learner uses up in 3/4
of its time yields at most 1.5 · 0.75 < 2 times what it can use, and only from twice as much on the
number is reduced. In addition, a number that was too high is not tried again for ten minutes.
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

WINDOW = 30.0  # seconds that the load is averaged over, and between two changes at least
COOLDOWN = 600.0  # seconds in which a number that was too high is not tried again
STARVED = 0.25  # share of its time that the learner waits for episodes: more actors
ROOM = 0.7  # share of its time up to which a planner may be busy, to allow more actors
BLOCKED = 0.5  # share of their time that actors wait for the learner: fewer actors
# Queueing time over computing time, of a planner that is busy for such a share: fewer actors.
QUEUED, BUSY = 2.0, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorBounds:
    """Between which autoscaling chooses the number of actors."""

    min_actors: int
    max_actors: int


class Autoscaler:
    """Chooses the number of actors from the metrics of the run."""

    def __init__(self, bounds: ActorBounds) -> None:
        self.bounds = bounds
        self._snapshots: deque[tuple[float, Snapshot]] = deque()
        self._too_many: tuple[int, float] | None = None  # a number, and until when it is avoided

    def decide(self, now: float, snapshot: Snapshot, *, actors: int, running: int) -> int:
        """How many actors there should be; `actors` are wanted now, and `running` of them work."""
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
        """The number that fits the load of the last WINDOW."""
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
