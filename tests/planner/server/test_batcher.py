"""Requests that share batches: how long they wait, when they are rejected, what a failure means."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from m3pc.telemetry import catalogue
from m3pc.telemetry import recorder as telemetry
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Decision, Floats, InputError, PlanRequest, Rejection, RejectReason
from planner.server.batcher import Batcher, PlanningEngine, PlanReply
from tests.support.fakes.fake_planner import FakePlanner
from tests.support.models.small_weights import windows

SECONDS = 20.0  # longest wait of a test


class FakeEngine:
    """Accepts every request but one mode. A decision depends on its request only."""

    def __init__(self, version: int = 3) -> None:
        self._planner = FakePlanner(2, repeat(version))

    def check(self, request: PlanRequest) -> None:
        if request.mode == "nonsense":
            raise InputError("mode is nonsense")

    def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
        return [self._planner.decide(request.window) for request in requests]


class SteppedEngine(FakeEngine):
    """Computes a batch when the test lets it; keeps what it was given, and has a clock."""

    def __init__(self, version: int = 3) -> None:
        super().__init__(version)
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.batches: list[list[int]] = []  # rows of each request of each batch
        self.seeds: list[int] = []
        self.now = 0.0

    def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
        self.begun.release()
        assert self.go_on.acquire(timeout=SECONDS)
        self.batches.append([len(request.window) for request in requests])
        self.seeds += [int(seed) for request in requests for seed in request.window.seeds]
        return super().compute(requests)

    def clock(self) -> float:
        return self.now


def request_of(rows: int = 1, seed: int = 0) -> PlanRequest:
    return PlanRequest(window=windows([4] * rows, seed=seed))


def expected_actions(request: PlanRequest) -> Floats:
    return FakeEngine().compute([request])[0].actions


def open_batcher(engine: PlanningEngine, **changes: Any) -> Batcher:
    options: dict[str, Any] = {"max_rows": 8, "max_wait": 0.0, "queue_rows": 64}
    return Batcher(engine, **options | {"recorder": Recorder()} | changes)


@pytest.fixture
def stepped() -> Iterator[SteppedEngine]:
    engine = SteppedEngine()
    yield engine
    engine.go_on.release(1000)  # ends every batch that still waits


def decision(reply: "Future[PlanReply]") -> Decision:
    result = reply.result(SECONDS)
    assert isinstance(result, Decision), result
    return result


def rejection(reply: "Future[PlanReply]") -> Rejection:
    result = reply.result(SECONDS)
    assert isinstance(result, Rejection)
    return result


def busy(batcher: Batcher, stepped: SteppedEngine) -> "Future[PlanReply]":
    """A first request, once it is being computed."""
    first = batcher.submit(request_of(), 60)
    assert stepped.begun.acquire(timeout=SECONDS)
    return first


def test_requests_that_arrive_during_a_batch_share_the_next_one(stepped: SteppedEngine) -> None:
    with open_batcher(stepped) as batcher:
        replies = [busy(batcher, stepped)]
        replies += [batcher.submit(request_of(seed=n), 60) for n in range(1, 6)]
        stepped.go_on.release(2)
        decisions = [decision(reply) for reply in replies]
    assert stepped.batches == [[1], [1] * 5]
    for n, one in enumerate(decisions):
        np.testing.assert_array_equal(one.actions, expected_actions(request_of(seed=n)))


def test_a_batch_has_no_more_rows_than_it_may(stepped: SteppedEngine) -> None:
    with open_batcher(stepped, max_rows=8) as batcher:
        replies = [busy(batcher, stepped)]
        replies += [batcher.submit(request_of(rows), 60) for rows in (3, 5, 4, 5, 20, 1)]
        stepped.go_on.release(10)
        assert [len(decision(reply).actions) for reply in replies] == [1, 3, 5, 4, 5, 20, 1]
    assert stepped.batches == [[1], [3, 5], [4], [5], [20], [1]]


def test_a_full_batch_does_not_wait(stepped: SteppedEngine) -> None:
    with open_batcher(stepped, max_rows=8, max_wait=1000.0) as batcher:
        replies = [batcher.submit(request_of(4), 60), batcher.submit(request_of(4), 60)]
        stepped.go_on.release()
        wait(replies, SECONDS)
        assert [len(decision(reply).actions) for reply in replies] == [4, 4]
    assert stepped.batches == [[4, 4]]


def test_a_batch_waits_for_more_rows_and_not_longer_than_allowed(stepped: SteppedEngine) -> None:
    with open_batcher(stepped, max_wait=0.02, clock=stepped.clock) as batcher:
        replies = [batcher.submit(request_of(), 60)]
        assert not stepped.begun.acquire(timeout=0.1), "no time has passed on its clock"
        replies.append(batcher.submit(request_of(), 60))
        assert not stepped.begun.acquire(timeout=0.1)
        stepped.now = 0.03
        stepped.go_on.release()
        assert [decision(reply).version for reply in replies] == [3, 3]
    assert stepped.batches == [[1, 1]]


def test_a_full_queue_says_when_to_retry(stepped: SteppedEngine) -> None:
    recorder = Recorder()
    with open_batcher(stepped, queue_rows=4, recorder=recorder) as batcher:
        first = busy(batcher, stepped)
        waiting = [batcher.submit(request_of(3), 60), batcher.submit(request_of(), 60)]
        late = batcher.submit(request_of(), 60)
        assert late.done() and not first.done()
        assert rejection(late).why == RejectReason.RETRY_LATER
        assert rejection(late).wait > 0
        assert telemetry.value(recorder.snapshot(), catalogue.QUEUE_ROWS) == 4
        stepped.go_on.release(2)
        assert [len(decision(reply).actions) for reply in [first, *waiting]] == [1, 3, 1]
        stepped.go_on.release()
        assert decision(batcher.submit(request_of(), 60)).version == 3, "there is room again"
    assert telemetry.value(recorder.snapshot(), catalogue.QUEUE_ROWS) == 0


@pytest.mark.parametrize("rows", [0, 5])
def test_a_request_that_never_fits_is_bad(rows: int) -> None:
    with open_batcher(FakeEngine(), queue_rows=4) as batcher:
        bad = rejection(batcher.submit(request_of(rows), 60))
    assert (bad.why, f"has {rows} rows" in bad.reason) == (RejectReason.BAD, True)


def test_a_request_past_its_deadline_is_not_computed(stepped: SteppedEngine) -> None:
    with open_batcher(stepped, clock=stepped.clock) as batcher:
        first = busy(batcher, stepped)
        short, long = batcher.submit(request_of(seed=1), 5), batcher.submit(request_of(seed=2), 60)
        stepped.now = 5.0
        stepped.go_on.release(2)
        assert rejection(short).why == RejectReason.LATE
        assert decision(first).version == decision(long).version == 3
    assert stepped.seeds == [0, 20]


def test_a_cancelled_request_is_not_computed(stepped: SteppedEngine) -> None:
    recorder = Recorder()
    with open_batcher(stepped, recorder=recorder) as batcher:
        busy(batcher, stepped)
        cancelled, kept = (
            batcher.submit(request_of(seed=1), 60),
            batcher.submit(request_of(seed=2), 60),
        )
        assert cancelled.cancel()
        stepped.go_on.release(2)
        decision(kept)
    assert stepped.seeds == [0, 20]
    assert telemetry.value(recorder.snapshot(), catalogue.REQUESTS, "late") == 1


def test_a_bad_request_is_answered_alone(stepped: SteppedEngine) -> None:
    bad = PlanRequest(window=windows([4]), mode="nonsense")
    with open_batcher(stepped) as batcher:
        replies = [busy(batcher, stepped), batcher.submit(request_of(seed=1), 60)]
        rejected = rejection(batcher.submit(bad, 60))
        replies.append(batcher.submit(request_of(seed=2), 60))
        stepped.go_on.release(2)
        for n, reply in enumerate(replies):
            expected = expected_actions(request_of(seed=n))
            np.testing.assert_array_equal(decision(reply).actions, expected)
    assert (rejected.why, rejected.reason) == (RejectReason.BAD, "mode is nonsense")
    assert stepped.batches == [[1], [1, 1]]


class FailingEngine(FakeEngine):
    """Fails on batches that hold certain seeds."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__()
        self.errors = errors
        self.batches: list[list[int]] = []  # rows of each request of each batch

    def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
        self.batches.append([len(request.window) for request in requests])
        for request in requests:
            if error := self.errors.get(int(request.window.seeds[0])):
                raise error
        return super().compute(requests)


def test_a_batch_that_fails_is_tried_request_by_request() -> None:
    failing = FailingEngine({10: RuntimeError("no luck"), 30: InputError("other sizes")})
    recorder = Recorder()
    with open_batcher(failing, max_rows=4, max_wait=1000.0, recorder=recorder) as batcher:
        replies = [batcher.submit(request_of(seed=n), 60) for n in range(4)]
        good = [decision(replies[n]) for n in (0, 2)]
        bad = [rejection(replies[n]) for n in (1, 3)]
    assert [rejected.why for rejected in bad] == [RejectReason.FAILED, RejectReason.BAD]
    assert "no luck" in bad[0].reason
    for n, one in zip((0, 2), good, strict=True):
        np.testing.assert_array_equal(one.actions, expected_actions(request_of(seed=n)))
    assert failing.batches == [[1] * 4, [1], [1], [1], [1]]
    results = recorder.snapshot()[catalogue.REQUESTS.name]
    assert results["ok"] == [2] and results["failed"] == results["bad"] == [1]


def test_a_request_that_fails_alone_is_not_tried_again() -> None:
    failing = FailingEngine({0: RuntimeError("no luck")})
    with open_batcher(failing) as batcher:
        assert rejection(batcher.submit(request_of(), 60)).why == RejectReason.FAILED
    assert failing.batches == [[1]]


def test_too_few_decisions_are_a_failure_of_all() -> None:
    class ForgetfulEngine(FakeEngine):
        def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
            return super().compute(requests)[1:]

    with open_batcher(ForgetfulEngine(), max_rows=2, max_wait=1000.0) as batcher:
        replies = [batcher.submit(request_of(seed=n), 60) for n in range(2)]
        assert [rejection(reply).why for reply in replies] == [RejectReason.FAILED] * 2


def test_an_action_that_is_not_finite_is_rejected() -> None:
    class OverflowingEngine(FakeEngine):
        def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
            decisions = super().compute(requests)
            decisions[1].actions[0, 1] = np.nan
            return decisions

    with open_batcher(OverflowingEngine(), max_rows=2, max_wait=1000.0) as batcher:
        good, bad = (batcher.submit(request_of(seed=n), 60) for n in range(2))
        assert np.isfinite(decision(good).actions).all()
        assert rejection(bad).why == RejectReason.BAD


class SmallEngine(FakeEngine):
    """Has memory for a few rows only."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.batches: list[int] = []  # rows

    def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
        self.batches.append(sum(len(request.window) for request in requests))
        if self.batches[-1] > self.room:
            raise MemoryError("no room")
        return super().compute(requests)


def test_a_batch_without_room_is_computed_in_smaller_ones() -> None:
    small, recorder = SmallEngine(room=4), Recorder()
    with open_batcher(small, max_rows=8, max_wait=1000.0, recorder=recorder) as batcher:
        replies = [batcher.submit(request_of(rows, seed=n), 60) for n, rows in enumerate((3, 4, 1))]
        for n, (rows, reply) in enumerate(zip((3, 4, 1), replies, strict=True)):
            (expected,) = FakeEngine().compute([request_of(rows, seed=n)])
            np.testing.assert_array_equal(decision(reply).actions, expected.actions)
            np.testing.assert_array_equal(decision(reply).target_returns, expected.target_returns)
        assert small.batches == [8, 3, 4, 1]
        reply = batcher.submit(request_of(4, seed=9), 60)
        assert len(decision(reply).actions) == 4, "4 rows are a full batch by now"
    assert small.batches[4:] == [4]
    assert telemetry.value(recorder.snapshot(), catalogue.OUT_OF_MEMORY) == 1


def test_a_large_request_without_room_is_cut() -> None:
    small = SmallEngine(room=4)
    with open_batcher(small, max_rows=8) as batcher:
        first = decision(batcher.submit(request_of(16), 60))
        again = decision(batcher.submit(request_of(10), 60))
    np.testing.assert_array_equal(first.actions, expected_actions(request_of(16)))
    np.testing.assert_array_equal(again.actions, expected_actions(request_of(10)))
    assert small.batches == [16, 4, 4, 4, 4, 4, 4, 2]


def test_requests_come_through_once_halves_are_small_enough() -> None:
    small = SmallEngine(room=1)
    with open_batcher(small, max_rows=8) as batcher:
        while isinstance(batcher.submit(request_of(8), 60).result(SECONDS), Rejection):
            assert len(small.batches) < 20
    assert small.batches[-8:] == [1] * 8


def test_batches_grow_again_slowly() -> None:
    small = SmallEngine(room=4)
    with open_batcher(small, max_rows=8, grow_after=2) as batcher:
        decision(batcher.submit(request_of(8), 60))
        small.room = 100
        for _ in range(8):
            decision(batcher.submit(request_of(8), 60))
    assert small.batches == [8, 4, 4, 4, 4, 4, 4, 5, 3, 5, 3, 6, 2, 6, 2, 7, 1, 7, 1]


def test_a_swap_happens_between_two_batches(stepped: SteppedEngine) -> None:
    newer = SteppedEngine(version=4)
    newer.go_on.release(100)
    with open_batcher(stepped) as batcher:
        first = busy(batcher, stepped)
        second = batcher.submit(request_of(), 60)
        batcher.swap(newer)
        third = batcher.submit(request_of(), 60)
        stepped.go_on.release()
        assert [decision(reply).version for reply in (first, second, third)] == [3, 4, 4]
    assert (stepped.batches, newer.batches) == ([[1]], [[1, 1]])


def test_every_batch_is_of_one_version_while_versions_change() -> None:
    batches: list[set[int]] = []

    class VersionedEngine(FakeEngine):
        def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
            decisions = super().compute(requests)
            batches.append({decision.version for decision in decisions})
            return decisions

    with open_batcher(VersionedEngine(0)) as batcher:
        versions = []
        for number in range(1, 100):
            replies = [batcher.submit(request_of(), 60) for _ in range(3)]
            batcher.swap(VersionedEngine(number))
            versions += [decision(reply).version for reply in replies]
    assert all(len(batch) == 1 for batch in batches)
    assert versions == sorted(versions) and versions[-1] >= 98


def test_a_batch_that_hangs_shows(stepped: SteppedEngine) -> None:
    with open_batcher(stepped, clock=stepped.clock) as batcher:
        assert batcher.stuck_for() == 0
        first = busy(batcher, stepped)
        stepped.now = 31.0
        assert batcher.stuck_for() == 31
        stepped.go_on.release()
        decision(first)
        assert batcher.stuck_for() == 0


def test_closing_answers_every_request(stepped: SteppedEngine) -> None:
    batcher = open_batcher(stepped)
    first, second = busy(batcher, stepped), batcher.submit(request_of(), 60)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    stepped.go_on.release()
    closing.join(SECONDS)
    assert decision(first).version == 3
    for reply in (second, batcher.submit(request_of(), 60)):
        assert rejection(reply).why == RejectReason.FAILED
    assert not batcher.alive


def test_closing_while_a_batch_hangs_answers_every_request(stepped: SteppedEngine) -> None:
    batcher = open_batcher(stepped)
    replies = [busy(batcher, stepped), batcher.submit(request_of(), 60)]
    batcher.close(timeout=0.05)
    assert [rejection(reply).why for reply in replies] == [RejectReason.FAILED] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_request_waits_for_a_thread_that_died() -> None:
    class DeadlyEngine(FakeEngine):
        def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
            raise SystemExit

    batcher = open_batcher(DeadlyEngine(), max_rows=2, max_wait=1000.0)
    replies = [batcher.submit(request_of(), 60) for _ in range(2)]
    assert [rejection(reply).why for reply in replies] == [RejectReason.FAILED] * 2
    batcher.close()
    assert rejection(batcher.submit(request_of(), 60)).why == RejectReason.FAILED


def test_requests_and_durations_are_recorded(stepped: SteppedEngine) -> None:
    recorder = Recorder()
    with open_batcher(stepped, recorder=recorder, clock=stepped.clock) as batcher:
        replies = [busy(batcher, stepped), *(batcher.submit(request_of(2), 60) for _ in range(3))]
        stepped.now = 4.0
        stepped.go_on.release(2)
        wait(replies, SECONDS)
    snapshot = recorder.snapshot()
    assert snapshot[catalogue.REQUESTS.name] == {"ok": [4]}
    assert telemetry.value(snapshot, catalogue.PLANNER_BUSY) == 4
    assert telemetry.mean(snapshot, catalogue.BATCH_ROWS) == 3.5
    assert telemetry.mean(snapshot, catalogue.PLAN_SECONDS, "queue") == 3
    assert telemetry.mean(snapshot, catalogue.PLAN_SECONDS, "compute") == 1
    assert telemetry.mean(snapshot, catalogue.PLAN_SECONDS, "total") == 4
