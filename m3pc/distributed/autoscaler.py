"""How many rollout actors a run should have: more while the learner waits for what they collect and
the planner has room, fewer while they wait for the learner or in the planner's queue.

It cannot flap. Between the bounds for more and for fewer there is room for the largest step:
adding a quarter (one of few: at most half) to actors that the learner uses up in 3/4 of its time
makes at most 1.5 · 0.75 < 2 times what it can use, and only at twice as much are there fewer. And
whatever the reasons, a number that was left because it was too high is not tried again for ten
minutes.
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

WINDOW = 30.0  # seconds that are looked at; nothing changes before they have passed since a change
REST = 600.0  # seconds in which a number that was too high is not tried again
STARVED = 0.25  # of its time that a learner waits for what is collected: more
ROOM = 0.7  # of its time that a planner may work, for there to be more
BLOCKED = 0.5  # of their time that actors wait for the learner: fewer
QUEUED, BUSY = 2.0, 0.95  # waiting against computing, of a planner that always works: fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorBounds:
    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoad:
    """Of a run, over some seconds; parts of 1 but for `queued`."""

    starved: float  # the learner's time without anything to do
    blocked: float  # the actors' time without room in the store
    busy: float  # the planners' time at work
    queued: float  # a request's time in the queue, in times of its computation


class Autoscaler:
    def __init__(self, bounds: ActorBounds) -> None:
        self.bounds = bounds
        self._seen: deque[tuple[float, Snapshot]] = deque()
        self._too_many: tuple[int, float] | None = None  # a number, and until when it is not tried

    def decide(self, now: float, snapshot: Snapshot, *, actors: int, running: int) -> int:
        """How many actors there should be; of `actors` that are wanted `running` work."""
        inside = min(max(actors, self.bounds.least), self.bounds.most)
        if inside != actors or running != actors:  # whoever starts or is away is no measure
            self._seen.clear()
            return inside
        self._seen.append((now, snapshot))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()
        if now - self._seen[0][0] < WINDOW:
            return actors
        wanted = self._better(now, self._load(actors), actors)
        if wanted != actors:
            self._seen.clear()
        return wanted

    def _better(self, now: float, load: RunLoad, actors: int) -> int:
        step = max(1, actors // 4)
        if load.blocked >= BLOCKED or (load.busy >= BUSY and load.queued >= QUEUED):
            self._too_many = (actors, now + REST)
            return max(self.bounds.least, actors - step)
        if load.starved >= STARVED and load.busy <= ROOM:
            return min(self.bounds.most, actors + step, self._ceiling(now, actors))
        return actors

    def _ceiling(self, now: float, actors: int) -> int:
        if self._too_many is None or now >= self._too_many[1]:
            return self.bounds.most
        return max(actors, self._too_many[0] - 1)

    def _load(self, actors: int) -> RunLoad:
        (begin, before), (end, after) = self._seen[0], self._seen[-1]

        def more(metric: Metric, label: str = "") -> float:
            return max(0.0, _total(after, metric, label) - _total(before, metric, label))

        busy, idle = more(PLANNER_BUSY), more(PLANNER_IDLE)
        computing = more(PLAN_SECONDS, "compute")
        return RunLoad(
            starved=more(LEARNER_WAIT, "limiter") / (end - begin),
            blocked=more(ACTOR_BLOCKED, "replay") / (end - begin) / max(actors, 1),
            busy=busy / (busy + idle) if busy + idle else 0.0,
            queued=more(PLAN_SECONDS, "queue") / computing if computing else 0.0,
        )


def _total(snapshot: Snapshot, metric: Metric, label: str) -> float:
    """Of a counter; of a histogram, the sum of what it observed."""
    return snapshot.get(metric.name, {}).get(label, [0.0])[-1]
