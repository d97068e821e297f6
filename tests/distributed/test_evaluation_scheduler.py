"""When a run is measured, and that nothing keeps it from ending."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from m3pc.distributed.evaluation_scheduler import ASK_SECONDS, HUNG, TRIES, EvaluationScheduler
from m3pc.model.weights import from_bytes
from m3pc.online.evaluation import Evaluated
from m3pc.online.recovery import WEIGHTS, weights_path
from m3pc.online.run_folder import OnlineRun
from m3pc.tracking.run_log import RunLog, read
from m3pc.types import Coordinator, Version
from tests.support.models.published import publish, versioned
from tests.support.runs.small_online import coordinator, new_run
from tests.support.servers.waiting import eventually

pytestmark = pytest.mark.ray
EVERY = 100


@ray.remote(num_cpus=0)
class Evaluator:
    """Says which version it was given, or dies of it."""

    def evaluate(self, content: bytes) -> Evaluated:
        number = Version.unpacked(from_bytes(content).version).number
        if number == 13:
            os._exit(1)
        if number == 12:
            raise ValueError("an environment that is broken")
        return Evaluated(numbers={"return": float(number)}, returns=[float(number)])


@ray.remote(num_cpus=0)
class Waiting:
    def wait(self) -> None:
        time.sleep(600)


@dataclass
class Seat:
    """The evaluator's, as the examiner sees it."""

    handle: Any
    state: str = "up"
    report: float | None = 0.0
    reason: str = ""

    def lost(self, now: float, reason: str) -> None:
        self.reason = reason


@dataclass
class Desk:
    run: OnlineRun
    seat: Seat
    coordinator: Coordinator
    examiner: EvaluationScheduler
    log: RunLog

    def publish(self, number: int) -> None:
        publish(self.coordinator, self.run.path, versioned(number))

    def look(self, steps: int, *, last: bool = False, now: float = 0.0) -> list[tuple[int, float]]:
        """Ask if it is time, and hear the answer; all that was measured so far."""
        before = len(self.examiner.rows)
        self.examiner.poll(now, steps, self.log, last=last)

        def heard() -> bool:
            if self.examiner._pending is not None:
                self.examiner.poll(now, steps, self.log, last=last)
            return self.examiner._pending is None or len(self.examiner.rows) > before

        assert eventually(heard)
        return [(row["step"], row["return"]) for row in read(self.run.path, "evaluation")]


@pytest.fixture
def desk(ray_cluster: None, tmp_path: Path) -> Iterator[Desk]:
    run = new_run(tmp_path / "run", evaluation__every=EVERY)
    seat = Seat(handle=cast(Any, Evaluator).remote())
    with closing(coordinator(run)) as known, RunLog(run.path, done=0, unit="step") as log:
        known.new_epoch(WEIGHTS)
        examiner = EvaluationScheduler(run, cast(Any, seat), known)
        yield Desk(run, seat, known, examiner, log)
    ray.kill(seat.handle)


def test_first_the_offline_weights_then_the_newest_after_so_many_steps(desk: Desk) -> None:
    desk.publish(5)
    assert desk.look(30) == [(0, 0)], "what it was before, at step 0"
    assert desk.look(99) == [(0, 0)]
    assert desk.look(100) == [(0, 0), (100, 5)]
    desk.publish(6)
    assert desk.look(199) == [(0, 0), (100, 5)]
    assert desk.look(431) == [(0, 0), (100, 5), (431, 6)]
    assert not desk.examiner.is_done(0.0, 450)
    assert desk.look(450, last=True)[-1] == (450, 6), "the last, wherever it ends"
    assert desk.examiner.is_done(0.0, 450)


def test_a_run_that_goes_on_does_not_measure_again_what_it_has(desk: Desk) -> None:
    desk.publish(5)
    desk.look(0)
    desk.look(120)
    again = EvaluationScheduler(desk.run, cast(Any, desk.seat), desk.coordinator)
    again.poll(0.0, 150, desk.log)
    assert again._pending is None


def test_an_evaluation_that_was_lost_is_asked_for_again(desk: Desk) -> None:
    desk.look(0)
    desk.publish(13)
    assert desk.look(100) == [(0, 0)]
    assert not desk.examiner.is_done(0.0, 100)
    desk.seat.handle = cast(Any, Evaluator).remote()
    desk.publish(14)
    assert desk.look(100) == [(0, 0), (100, 14)]


def test_an_evaluation_that_kills_its_process_each_time_is_given_up(desk: Desk) -> None:
    desk.look(0)
    desk.publish(13)
    for _ in range(TRIES):
        assert not desk.examiner.is_done(0.0, 100)
        assert desk.look(100, last=True) == [(0, 0)]
        desk.seat.handle = cast(Any, Evaluator).remote()
    assert desk.examiner.is_done(0.0, 100)


def test_an_evaluation_that_fails_is_not_tried_again_but_the_next_one_is(desk: Desk) -> None:
    desk.look(0)
    desk.publish(12)
    assert desk.look(100) == [(0, 0)]
    assert desk.examiner.is_done(0.0, 100)
    assert desk.look(150) == [(0, 0)]
    desk.publish(14)
    assert desk.look(200) == [(0, 0), (200, 14)]


def test_a_changed_file_is_not_measured_and_not_waited_for_without_end(desk: Desk) -> None:
    desk.publish(5)
    desk.look(0)
    path = desk.run.path / weights_path(Version(epoch=1, number=5))
    path.write_bytes(path.read_bytes() + b"\0")
    assert desk.look(100, last=True, now=10.0) == [(0, 0)]
    assert not desk.examiner.is_done(10.0 + ASK_SECONDS, 100)
    assert desk.examiner.is_done(10.1 + ASK_SECONDS, 100)


def test_an_evaluator_that_ended_too_often_is_not_waited_for(desk: Desk) -> None:
    desk.seat.state = "parked"
    assert desk.examiner.is_done(0.0, 100)


def test_an_evaluation_that_hangs_is_ended(desk: Desk) -> None:
    never: Any = cast(Any, Waiting).remote()
    desk.examiner._pending = (100, never.wait.remote())
    desk.seat.report = HUNG
    desk.examiner.poll(0.0, 100, desk.log)
    assert desk.seat.reason == ""
    desk.seat.report = HUNG + 1
    desk.examiner.poll(0.0, 100, desk.log)
    assert "took no step for 601 s" in desk.seat.reason
    ray.kill(never)
