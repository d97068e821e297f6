"""The planner server in one process: real weights, batches, new versions, a watchdog."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from m3pc.telemetry import catalogue, recorder
from m3pc.types import Decision, InputError, PlanRequest, Rejection, RejectReason, Version
from planner.policy import Policy
from planner.server.service import PlannerService
from planner.server.watchdog import batch_watchdog
from tests.support.models.plan_requests import BAD_REQUESTS, mixed_requests
from tests.support.models.published import publish, small_config, versioned
from tests.support.models.small_weights import windows
from tests.support.servers.coordinators import InFile

SECONDS = 30.0


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads, which a service sets for the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def reply(service: PlannerService, request: PlanRequest) -> Decision | Rejection:
    return service.submit(request, SECONDS).result(SECONDS)


def test_bad_requests_among_good_ones_change_no_answer(threads: None) -> None:
    good = mixed_requests()
    huge = windows([4, 2])
    huge.states[0] = 3e38
    bad = [
        request
        for request, _ in BAD_REQUESTS.values()
        if isinstance(request.window.now, np.ndarray)
    ]
    weights = versioned(0)
    expected = Policy(weights).answer(good)
    with PlannerService(weights) as service, ThreadPoolExecutor(8) as pool:
        mixed = [*good, *bad, PlanRequest(window=huge, mode="q")]
        order = np.random.default_rng(0).permutation(len(mixed))
        shuffled = pool.map(lambda n: reply(service, mixed[n]), order)
        replies = dict(zip(order, shuffled, strict=True))
        results = service.report().snapshot[catalogue.REQUESTS.name]
    for n, one in enumerate(expected):
        other = replies[n]
        assert isinstance(other, Decision)
        np.testing.assert_allclose(other.actions, one.actions, rtol=1e-3, atol=1e-4)
    rejected = [replies[n] for n in range(len(good), len(mixed))]
    reasons = [one.why for one in rejected if isinstance(one, Rejection)]
    assert reasons == [RejectReason.BAD] * 19
    assert results == {"ok": [len(good)], "bad": [19]}


def test_a_server_follows_newer_versions_and_says_which_one_answers(
    threads: None, tmp_path: Path
) -> None:
    place = InFile(tmp_path)
    coordinator = place.client()
    coordinator.new_epoch("weights")
    publish(coordinator, tmp_path, versioned(1))
    request = PlanRequest(window=windows([4, 1]))
    with PlannerService(versioned(7, epoch=0), small_config()) as service:
        assert service.version == 7
        service.follow(coordinator, tmp_path)
        first = reply(service, request)
        assert isinstance(first, Decision)
        assert Version.unpacked(first.version) == Version(epoch=1, number=1), "from the start"
        publish(coordinator, tmp_path, versioned(2))
        newest, decisions = Version(epoch=1, number=2).packed, [first]
        while decisions[-1].version != newest:
            decision = reply(service, request)
            assert isinstance(decision, Decision) and len(decisions) < 100_000
            decisions.append(decision)
        report = service.report()
    expected = {n: Policy(versioned(n)).decide(request.window) for n in (1, 2)}
    for decision in decisions:
        number = Version.unpacked(decision.version).number
        np.testing.assert_allclose(decision.actions, expected[number].actions, atol=1e-4)
    assert report.detail.version == newest
    assert recorder.value(report.snapshot, catalogue.PLANNER_VERSION) == 2
    place.close()


def test_a_server_does_not_start_with_weights_that_cannot_plan(threads: None) -> None:
    good = versioned(1)
    tensors = {name: torch.full_like(x, 3e38) for name, x in good.tensors.items()}
    with pytest.raises(InputError, match="cannot plan"):
        PlannerService(dataclasses.replace(good, tensors=tensors))


def test_a_server_that_is_closed_refuses(threads: None) -> None:
    service = PlannerService(versioned(1))
    assert service.ready
    service.close()
    rejection = reply(service, PlanRequest(window=windows([4])))
    assert isinstance(rejection, Rejection) and rejection.why == RejectReason.FAILED
    assert not service.ready


def test_a_planner_that_hangs_ends_its_process() -> None:
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    watchdog = batch_watchdog(lambda: 0.3, 0.2, end=end)
    watchdog.start()
    assert ended.wait(SECONDS)
    watchdog.close()
    assert codes == [70]


def test_a_planner_that_works_is_left_alone() -> None:
    polls = threading.Semaphore(0)
    codes: list[int] = []

    def stuck_for() -> float:
        polls.release()
        return 0.05

    watchdog = batch_watchdog(stuck_for, 0.1, end=codes.append)
    watchdog.start()
    for _ in range(5):
        assert polls.acquire(timeout=SECONDS)
    watchdog.close()
    assert codes == []


HANGS = {
    "asleep": ("time.sleep(60)", 70),
    "holding the interpreter": ("ctypes.PyDLL(None).sleep(60)", 1),
}


@pytest.mark.parametrize("kind", HANGS)
def test_a_process_whose_batch_hangs_ends(kind: str) -> None:
    hang, code = HANGS[kind]
    script = f"""
import ctypes, time
from planner.server.watchdog import batch_watchdog
begin = time.monotonic()
batch_watchdog(lambda: time.monotonic() - begin, 0.5).start()
time.sleep(0.2)
{hang}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=SECONDS, capture_output=True, check=False
    )
    assert done.returncode == code
    assert b"Thread" in done.stderr, "where it hung"
