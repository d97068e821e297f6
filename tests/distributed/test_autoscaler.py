"""How many actors a run gets: as many as its load allows, without oscillation."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3pc.distributed.autoscaler import COOLDOWN, WINDOW, ActorBounds, Autoscaler
from m3pc.telemetry.catalogue import (
    ACTOR_BLOCKED,
    LEARNER_WAIT,
    PLAN_SECONDS,
    PLANNER_BUSY,
    PLANNER_IDLE,
)
from m3pc.telemetry.recorder import Recorder

TURN = 1.0  # seconds


@dataclass
class Plant:
    """A run as rates: an actor collects at most `actor` steps a second, a planner answers at most
    `planner`, the learner learns from at most `learner`. The slowest of the three decides."""

    actor: float
    planner: float
    learner: float
    recorder: Recorder = field(default_factory=Recorder)

    def turn(self, actors: int) -> None:
        offered = actors * self.actor
        done = min(offered, self.planner, self.learner)
        record, busy = self.recorder, done / self.planner
        record.add(LEARNER_WAIT, TURN * (1 - done / self.learner), "limiter")
        if self.learner < min(offered, self.planner):
            record.add(ACTOR_BLOCKED, TURN * actors * (1 - self.learner / offered), "replay")
        record.add(PLANNER_BUSY, TURN * busy)
        record.add(PLANNER_IDLE, TURN * (1 - busy))
        record.observe(PLAN_SECONDS, TURN * busy, "compute")
        queued = max(0.0, offered / self.planner - 1) if done == self.planner else 0.0
        record.observe(PLAN_SECONDS, TURN * busy * queued, "queue")


def played(plant: Plant, actors: int, bounds: ActorBounds, seconds: int) -> list[int]:
    """Numbers of actors, second by second."""
    autoscaler, counts = Autoscaler(bounds), []
    for second in range(seconds):
        plant.turn(actors)
        snapshot = plant.recorder.snapshot()
        actors = autoscaler.decide(float(second), snapshot, actors=actors, running=actors)
        counts.append(actors)
    return counts


def turns(counts: list[int]) -> int:
    """How often the direction changed."""
    steps = [b - a for a, b in pairwise(counts) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def test_a_learner_that_waits_gets_more_actors_until_it_does_not() -> None:
    counts = played(
        Plant(actor=10, planner=10_000, learner=100),
        1,
        ActorBounds(min_actors=1, max_actors=64),
        3600,
    )
    assert 8 <= counts[-1] <= 10  # 7.5 feed it for three quarters of its time
    assert turns(counts) == 0


def test_actors_that_mostly_wait_for_the_learner_become_fewer() -> None:
    plant = Plant(actor=10, planner=10_000, learner=100)
    counts = played(plant, 64, ActorBounds(min_actors=1, max_actors=64), 3600)
    assert 10 <= counts[-1] <= 20
    assert turns(counts) == 0


def test_a_planner_without_room_gets_no_more_actors() -> None:
    plant = Plant(actor=10, planner=40, learner=1000)
    counts = played(plant, 4, ActorBounds(min_actors=1, max_actors=64), 3600)
    assert set(counts) == {4}


def test_a_long_queue_at_the_planner_means_fewer() -> None:
    plant = Plant(actor=10, planner=40, learner=1000)
    counts = played(plant, 64, ActorBounds(min_actors=1, max_actors=64), 3600)
    assert counts[-1] <= 12
    assert turns(counts) == 0


def test_bounds_are_kept_and_entered_at_once() -> None:
    starving = Plant(actor=1, planner=10_000, learner=10_000)
    assert played(starving, 2, ActorBounds(min_actors=4, max_actors=6), 600)[0] == 4
    assert max(played(starving, 2, ActorBounds(min_actors=4, max_actors=6), 600)) == 6
    flooded = Plant(actor=1000, planner=10_000, learner=1)
    assert min(played(flooded, 6, ActorBounds(min_actors=3, max_actors=6), 600)) == 3


def test_nothing_is_decided_before_a_window_has_passed() -> None:
    counts = played(
        Plant(actor=1, planner=100, learner=100), 1, ActorBounds(min_actors=1, max_actors=8), 200
    )
    changes = [at for at, pair in enumerate(pairwise(counts)) if len({*pair}) > 1]
    assert len(changes) >= 3
    assert changes[0] >= WINDOW - 2
    assert min(b - a for a, b in pairwise(changes)) >= WINDOW - 1


def test_while_an_actor_is_away_nothing_is_decided() -> None:
    autoscaler, plant = (
        Autoscaler(ActorBounds(min_actors=1, max_actors=8)),
        Plant(actor=1, planner=99, learner=99),
    )
    for second in range(300):
        plant.turn(2)
        snapshot = plant.recorder.snapshot()
        assert autoscaler.decide(float(second), snapshot, actors=2, running=1) == 2


def test_a_number_that_was_too_high_is_not_tried_again_soon() -> None:
    """Under a load that reverses every minute, changes stay few."""
    autoscaler, actors, counts = Autoscaler(ActorBounds(min_actors=1, max_actors=64)), 8, []
    recorder = Recorder()
    for second in range(7200):
        calm = (second // 60) % 2 == 0
        plant = Plant(actor=10, planner=10_000, learner=1000 if calm else 10, recorder=recorder)
        plant.turn(actors)
        actors = autoscaler.decide(
            float(second), recorder.snapshot(), actors=actors, running=actors
        )
        counts.append(actors)
    falls = [at for at, (a, b) in enumerate(pairwise(counts)) if b < a]
    for at in falls:
        left = counts[at]
        assert all(count < left for count in counts[at + 1 : at + 1 + int(COOLDOWN) - 1])


rates = st.floats(1.0, 1000.0)


@settings(max_examples=60, deadline=None)
@given(rates, rates, rates, st.integers(1, 64))
def test_a_steady_load_never_reverses_it_twice(
    actor: float, planner: float, learner: float, first: int
) -> None:
    counts = played(
        Plant(actor=actor, planner=planner, learner=learner),
        first,
        ActorBounds(min_actors=1, max_actors=64),
        2400,
    )
    assert turns(counts) <= 1
    assert len(set(counts[-300:])) == 1  # it has come to rest


@pytest.mark.parametrize("lost", [0.0, 1.0])
def test_totals_that_shrank_count_as_nothing(lost: float) -> None:
    """Totals may shrink while the report of a process is missing."""
    autoscaler, recorder = Autoscaler(ActorBounds(min_actors=1, max_actors=8)), Recorder()
    recorder.add(LEARNER_WAIT, 1000.0, "limiter")
    autoscaler.decide(0.0, recorder.snapshot(), actors=2, running=2)
    less = Recorder()
    less.add(LEARNER_WAIT, lost, "limiter")
    assert autoscaler.decide(WINDOW, less.snapshot(), actors=2, running=2) == 2
