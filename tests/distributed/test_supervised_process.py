"""A supervised process that never starts, cannot start, or falls silent."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import ray

from m3pc.distributed.supervised_process import RayRestartedProcess, SupervisedProcess
from m3pc.telemetry.process_report import ProcessReport
from tests.support.servers.waiting import eventually

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0)
class Part:
    def __init__(self, behaviour: str) -> None:
        if behaviour == "hangs":
            time.sleep(600)
        if behaviour == "fails":
            raise ValueError("give the same data")

    def report(self) -> ProcessReport[None]:
        return ProcessReport(pid=os.getpid(), snapshot={}, detail=None)


@pytest.fixture
def process(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[SupervisedProcess[None]]:
    """Its first process behaves as the parameter says, each later one works."""
    behaviours = iter([request.param, "works"])
    supervised: SupervisedProcess[None] = SupervisedProcess(
        "part",
        lambda: cast(Any, Part).remote(next(behaviours)),
        patience=60.0,
        start_seconds=1.0 if request.param == "hangs" else 60.0,
    )
    yield supervised
    supervised.end()


def polled(process: SupervisedProcess[None]) -> SupervisedProcess[None]:
    process.poll(time.monotonic())
    return process


@pytest.mark.parametrize("process", ["hangs"], indirect=True)
def test_a_process_that_does_not_start_is_created_again(process: SupervisedProcess[None]) -> None:
    assert eventually(lambda: polled(process).restarts.count)
    assert "did not start within 1 s" in process.reason
    process.start_seconds = 60.0
    assert eventually(lambda: polled(process).state == "up")
    assert (process.restarts.count, process.incarnation) == (1, 2)


@pytest.mark.parametrize("process", ["fails"], indirect=True)
def test_the_reason_of_a_failed_start_is_its_own_error(process: SupervisedProcess[None]) -> None:
    assert eventually(lambda: polled(process).restarts.count)
    assert process.reason.endswith("ValueError: give the same data")


@pytest.mark.parametrize("process", ["works"], indirect=True)
def test_a_report_is_as_old_as_its_request(process: SupervisedProcess[None]) -> None:
    begin = time.monotonic()
    assert eventually(lambda: polled(process).report)
    assert begin <= process.reported_at <= time.monotonic()


def test_a_silent_process_does_not_count_as_working_until_its_successor_answers(
    ray_cluster: None,
) -> None:
    """Its node may be cut off, and there may never be a successor."""
    make = cast(Any, Part).options(max_restarts=-1).remote
    process: RayRestartedProcess[None]
    process = RayRestartedProcess("part", lambda: make("works"), patience=2.0)
    try:
        assert eventually(lambda: polled(process).is_working and process.location)
        assert process.location is not None
        before = process.location.pid
        os.kill(before, signal.SIGSTOP)
        assert eventually(lambda: not polled(process).is_working)
        assert (process.report, process.state) == (None, "starting")
        assert eventually(lambda: polled(process).is_working and process.location)
        assert process.location is not None and process.location.pid != before
    finally:
        process.end()
