"""A process as its driver sees it: one that never starts, one that cannot."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import ray

from m3pc.distributed import supervisor as seats
from m3pc.distributed.supervisor import RayRestartedProcess, SupervisedProcess
from tests.support.servers.waiting import eventually

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0)
class Part:
    def __init__(self, how: str) -> None:
        if how == "hangs":
            time.sleep(600)
        if how == "fails":
            raise ValueError("give the same data")

    def report(self) -> int:
        return 1


@pytest.fixture
def seat(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[SupervisedProcess]:
    ways = iter([request.param, "works"])
    found = SupervisedProcess("part", lambda: cast(Any, Part).remote(next(ways)), patience=60.0)
    yield found
    found.end()


def looked(seat: SupervisedProcess) -> SupervisedProcess:
    seat.poll(time.monotonic())
    return seat


@pytest.mark.parametrize("seat", ["hangs"], indirect=True)
def test_one_that_does_not_start_is_made_again(
    seat: SupervisedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "START_SECONDS", 1.0)
    assert eventually(lambda: looked(seat).restarts.count)
    assert "did not start within 1 s" in seat.reason
    monkeypatch.undo()
    assert eventually(lambda: looked(seat).state == "up")
    assert seat.restarts.count == 1


@pytest.mark.parametrize("seat", ["fails"], indirect=True)
def test_why_one_could_not_start_is_told_in_its_own_words(seat: SupervisedProcess) -> None:
    assert eventually(lambda: looked(seat).restarts.count)
    assert seat.reason.endswith("ValueError: give the same data")


@pytest.mark.parametrize("seat", ["works"], indirect=True)
def test_a_report_is_known_to_be_as_old_as_its_question(seat: SupervisedProcess) -> None:
    begin = time.monotonic()
    assert eventually(lambda: looked(seat).report)
    assert begin <= seat.as_of <= time.monotonic()


def test_one_that_fell_silent_does_not_work_until_its_successor_answers(ray_cluster: None) -> None:
    """Its node may be cut off, and there may never be another."""
    make = cast(Any, Part).options(max_restarts=-1).remote
    seat = RayRestartedProcess("part", lambda: make("works"), patience=2.0)
    try:
        assert eventually(lambda: looked(seat).works and seat.home)
        assert seat.home is not None
        before = seat.home.pid
        os.kill(before, signal.SIGSTOP)
        assert eventually(lambda: not looked(seat).works)
        assert (seat.report, seat.state) == (None, "starting")
        assert eventually(lambda: looked(seat).works and seat.home)
        assert seat.home is not None and seat.home.pid != before
    finally:
        seat.end()
