"""The planner server in one process: real weights, batches, new versions, a watchdog."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from m3pc.telemetry import catalogue, recorder
from m3pc.types import Decision, InputError, PlanRequest, Rejection, RejectReason, Version
from planner.policy import Policy
from planner.server.service import PlannerService, answering
from planner.server.watchdog import batch_watchdog
from tests.planner.test_answers import BAD, every_kind
from tests.support.models.published import publish, small_config, versioned
from tests.support.models.small_weights import windows
from tests.support.servers.coordinators import InFile

SECONDS = 30.0


@pytest.fixture
def threads() -> Iterator[None]:
    """A service sets them for the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def reply(service: PlannerService, ask: PlanRequest) -> Decision | Rejection:
    return service.submit(ask, SECONDS).result(SECONDS)


def test_bad_requests_among_good_ones_change_no_answer(threads: None) -> None:
    good = every_kind()
    huge = windows([4, 2])
    huge.states[0] = 3e38
    bad = [ask for ask, _ in BAD.values() if isinstance(ask.window.now, np.ndarray)]
    weights = versioned(0)
    expected = Policy(weights).answer(good)
    with PlannerService(weights) as service, ThreadPoolExecutor(8) as pool:
        mixed = [*good, *bad, PlanRequest(window=huge, mode="q")]
        order = np.random.default_rng(0).permutation(len(mixed))
        found = dict(zip(order, pool.map(lambda n: reply(service, mixed[n]), order), strict=True))
        counted = service.report()[0][catalogue.REQUESTS.name]
    for n, one in enumerate(expected):
        other = found[n]
        assert isinstance(other, Decision)
        np.testing.assert_allclose(other.actions, one.actions, rtol=1e-3, atol=1e-4)
    refusals = [found[n] for n in range(len(good), len(mixed))]
    assert [each.why for each in refusals if isinstance(each, Rejection)] == [RejectReason.BAD] * 19
    assert counted == {"ok": [len(good)], "bad": [19]}


def test_a_server_takes_newer_versions_and_says_which_one_answers(
    threads: None, tmp_path: Path
) -> None:
    place = InFile(tmp_path)
    coordinator = place.client()
    coordinator.new_epoch("weights")
    publish(coordinator, tmp_path, versioned(1))
    ask = PlanRequest(window=windows([4, 1]))
    with PlannerService(versioned(7, epoch=0), small_config()) as service:
        assert service.version == 7
        service.follow(coordinator, tmp_path)
        first = reply(service, ask)
        assert isinstance(first, Decision)
        assert Version.unpacked(first.version) == Version(epoch=1, number=1), "from the start"
        publish(coordinator, tmp_path, versioned(2))
        wanted, seen = Version(epoch=1, number=2).packed, [first]
        while seen[-1].version != wanted:
            found = reply(service, ask)
            assert isinstance(found, Decision) and len(seen) < 100_000
            seen.append(found)
        snapshot, version, _, _ = service.report()
    expected = {n: Policy(versioned(n)).decide(ask.window) for n in (1, 2)}
    for each in seen:
        number = Version.unpacked(each.version).number
        np.testing.assert_allclose(each.actions, expected[number].actions, atol=1e-4)
    assert version == wanted
    assert recorder.value(snapshot, catalogue.PLANNER_VERSION) == 2
    place.close()


def test_weights_that_cannot_plan_are_no_start(threads: None) -> None:
    good = versioned(1)
    tensors = {name: torch.full_like(x, 3e38) for name, x in good.tensors.items()}
    with pytest.raises(InputError, match="cannot plan"):
        PlannerService(dataclasses.replace(good, tensors=tensors))


def test_a_server_that_is_closed_refuses(threads: None) -> None:
    service = PlannerService(versioned(1))
    assert service.ready
    service.close()
    found = reply(service, PlanRequest(window=windows([4])))
    assert isinstance(found, Rejection) and found.why == RejectReason.FAILED
    assert not service.ready


@pytest.mark.parametrize(
    "shortage",
    [lambda: torch.empty(1 << 60), lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))],
)
def test_a_lack_of_memory_is_known_as_such(shortage: object) -> None:
    class Large:
        def answer(self, asks: Sequence[PlanRequest]) -> list[Decision]:
            assert callable(shortage)
            next(shortage(), None)
            raise AssertionError("there was memory")

    with pytest.raises(MemoryError):
        answering(Large())([])  # type: ignore[arg-type]


def test_other_failures_stay_what_they_are() -> None:
    class Broken:
        def answer(self, asks: Sequence[PlanRequest]) -> list[Decision]:
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        answering(Broken())([])  # type: ignore[arg-type]


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
    looks = threading.Semaphore(0)
    codes: list[int] = []

    def stuck_for() -> float:
        looks.release()
        return 0.05

    watchdog = batch_watchdog(stuck_for, 0.1, end=codes.append)
    watchdog.start()
    for _ in range(5):
        assert looks.acquire(timeout=SECONDS)
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
