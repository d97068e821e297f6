"""When a run is evaluated, and that no evaluation keeps it from ending."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray.exceptions import RayError

from m3pc.distributed.evaluation_scheduler import (
    START_SECONDS,
    STEP_SECONDS,
    TRIES,
    EvaluationScheduler,
)
from m3pc.distributed.evaluator import EvaluatorStatus
from m3pc.online.evaluation import EvaluationRecord
from m3pc.online.recovery import WEIGHTS, weights_path
from m3pc.online.run_folder import OnlineRun
from m3pc.telemetry.process_report import ProcessReport
from m3pc.tracking.run_log import RunLog, read_metrics
from m3pc.types import Coordinator, Pointer, Version
from planner.server.weights_loader import read_published
from tests.support.models.published import publish, versioned
from tests.support.runs.small_online import coordinator, new_run
from tests.support.servers.waiting import eventually

pytestmark = pytest.mark.ray
EVERY = 100
HANGS, FAILS, DIES = 11, 12, 13  # versions, by what they do to the evaluator


@ray.remote(num_cpus=0)
class Evaluator:
    """Measures the number of the version that it reads; 0 for the offline weights."""

    def use(self, run: Path) -> None:
        self._run = run

    def evaluate(self, pointer: Pointer | None) -> EvaluationRecord:
        number = 0
        if pointer is not None:
            weights = read_published(self._run, pointer)
            number = Version.unpacked(weights.version).number
        if number == HANGS:
            time.sleep(600)
        if number == FAILS:
            raise ValueError("an environment that is broken")
        if number == DIES:
            os._exit(1)
        return EvaluationRecord(numbers={"return": float(number)}, returns=[float(number)])


def idle(seconds: float) -> ProcessReport[EvaluatorStatus]:
    return ProcessReport(pid=1, snapshot={}, detail=EvaluatorStatus(idle_seconds=seconds))


@dataclass
class FakeProcess:
    """The evaluator as the scheduler sees it."""

    handle: Any
    state: str = "up"
    report: ProcessReport[EvaluatorStatus] | None = None
    reason: str = ""

    def lost(self, now: float, reason: str) -> None:
        self.reason = reason


@dataclass
class Bench:
    """A scheduler with all that it works on."""

    run: OnlineRun
    process: FakeProcess
    coordinator: Coordinator
    scheduler: EvaluationScheduler
    log: RunLog

    def publish(self, number: int) -> None:
        publish(self.coordinator, self.run.path, versioned(number))

    def replace_evaluator(self) -> None:
        self.process.handle = started(self.run.path)

    def poll(self, steps: int, *, last: bool = False, now: float = 0.0) -> list[tuple[int, float]]:
        """Request an evaluation if it is due and wait for it; all results so far."""
        self.scheduler.poll(now, steps, self.log, last=last)

        def is_answered() -> bool:
            if self.scheduler.is_pending:
                self.scheduler.poll(now, steps, self.log, last=last)
            return not self.scheduler.is_pending

        assert eventually(is_answered)
        rows = read_metrics(self.run.path, "evaluation")
        return [(row["step"], row["return"]) for row in rows]


def started(run: Path) -> Any:
    handle = cast(Any, Evaluator).remote()
    ray.get(handle.use.remote(run), timeout=60.0)
    return handle


@pytest.fixture(scope="module")
def idle_evaluators(ray_cluster: None) -> Iterator[list[Any]]:
    """Evaluators of earlier tests, to be used again: a new one has to load torch."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
def bench(idle_evaluators: list[Any], tmp_path: Path) -> Iterator[Bench]:
    run = new_run(tmp_path / "run", evaluation__every=EVERY)
    if idle_evaluators:
        process = FakeProcess(handle=idle_evaluators.pop())
        ray.get(process.handle.use.remote(run.path), timeout=60.0)
    else:
        process = FakeProcess(handle=started(run.path))
    with closing(coordinator(run)) as client, RunLog(run.path, done=0, unit="step") as log:
        client.new_epoch(WEIGHTS)
        scheduler = EvaluationScheduler(run, cast(Any, process), client)
        yield Bench(run, process, client, scheduler, log)
    try:
        ray.get(process.handle.use.remote(run.path), timeout=2.0)
        idle_evaluators.append(process.handle)
    except RayError:  # it hangs, or died
        ray.kill(process.handle)


def test_first_the_offline_weights_then_the_newest_after_so_many_steps(bench: Bench) -> None:
    bench.publish(5)
    assert bench.poll(30) == [(0, 0)], "what it was before, at step 0"
    assert bench.poll(99) == [(0, 0)]
    assert bench.poll(100) == [(0, 0), (100, 5)]
    bench.publish(6)
    assert bench.poll(199) == [(0, 0), (100, 5)]
    assert bench.poll(431) == [(0, 0), (100, 5), (431, 6)]
    assert not bench.scheduler.is_done(0.0, 450)
    assert bench.poll(450, last=True)[-1] == (450, 6), "the last, wherever it ends"
    assert bench.scheduler.is_done(0.0, 450)


def test_a_resumed_run_does_not_repeat_its_evaluations(bench: Bench) -> None:
    bench.publish(5)
    bench.poll(0)
    bench.poll(120)
    resumed = EvaluationScheduler(bench.run, cast(Any, bench.process), bench.coordinator)
    resumed.poll(0.0, 150, bench.log)
    assert not resumed.is_pending


def test_an_evaluation_that_was_lost_is_requested_again(bench: Bench) -> None:
    bench.poll(0)
    bench.publish(DIES)
    assert bench.poll(100) == [(0, 0)]
    assert not bench.scheduler.is_done(0.0, 100)
    bench.replace_evaluator()
    bench.publish(14)
    assert bench.poll(100) == [(0, 0), (100, 14)]


def test_an_evaluation_that_kills_its_process_each_time_is_given_up(bench: Bench) -> None:
    bench.poll(0)
    bench.publish(DIES)
    for _ in range(TRIES):
        assert not bench.scheduler.is_done(0.0, 100)
        assert bench.poll(100, last=True) == [(0, 0)]
        bench.replace_evaluator()
    assert bench.scheduler.is_done(0.0, 100)


def test_an_evaluation_that_fails_is_not_tried_again_but_the_next_one_is(bench: Bench) -> None:
    bench.poll(0)
    bench.publish(FAILS)
    assert bench.poll(100) == [(0, 0)]
    assert bench.scheduler.is_done(0.0, 100)
    assert bench.poll(150) == [(0, 0)]
    bench.publish(14)
    assert bench.poll(200) == [(0, 0), (200, 14)]


def test_a_changed_file_is_not_measured_and_not_waited_for_without_end(bench: Bench) -> None:
    bench.publish(5)
    bench.poll(0)
    path = bench.run.path / weights_path(Version(epoch=1, number=5))
    path.write_bytes(path.read_bytes() + b"\0")
    assert bench.poll(100, last=True, now=10.0) == [(0, 0)]
    assert bench.poll(100, last=True, now=20.0) == [(0, 0)], "it is tried again"
    assert not bench.scheduler.is_done(10.0 + START_SECONDS, 100)
    assert bench.scheduler.is_done(10.1 + START_SECONDS, 100)


def test_a_changed_file_that_was_replaced_by_a_newer_one_is_measured(bench: Bench) -> None:
    bench.publish(5)
    bench.poll(0)
    path = bench.run.path / weights_path(Version(epoch=1, number=5))
    path.write_bytes(path.read_bytes()[:-1])
    assert bench.poll(100) == [(0, 0)]
    bench.publish(6)
    assert bench.poll(100) == [(0, 0), (100, 6)]


def test_an_evaluator_that_ended_too_often_is_not_waited_for(bench: Bench) -> None:
    bench.process.state = "parked"
    assert bench.scheduler.is_done(0.0, 100)


def test_an_evaluation_that_hangs_is_ended(bench: Bench) -> None:
    bench.poll(0)
    bench.publish(HANGS)
    bench.scheduler.poll(0.0, 100, bench.log)
    bench.process.report = idle(STEP_SECONDS)
    bench.scheduler.poll(0.0, 100, bench.log)
    assert bench.process.reason == ""
    bench.process.report = idle(STEP_SECONDS + 1)
    bench.scheduler.poll(0.0, 100, bench.log)
    assert "took no step for 601 s" in bench.process.reason
