"""Requests that share batches: who waits for whom, who is refused, what a failure touches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest

from m3pc.telemetry import catalogue
from m3pc.telemetry import recorder as telemetry
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Decision, InputError, PlanRequest, Rejection, RejectReason
from planner.server.batcher import Batcher, PlanReply
from tests.support.fakes.fake_planner import FakePlanner
from tests.support.models.small_weights import windows

SECONDS = 20.0  # for whatever a test waits for


class Stepped:
    """Answers when it is let go on; keeps the sizes of what it was asked, and its clock."""

    def __init__(self, version: int = 3) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.batches: list[list[int]] = []  # rows of each request of each batch
        self.seeds: list[int] = []
        self.now = 0.0
        self._planner = FakePlanner(2, iter([version] * 1000))

    def answer(self, asks: Sequence[PlanRequest]) -> list[Decision]:
        self.begun.release()
        assert self.go_on.acquire(timeout=SECONDS)
        self.batches.append([len(ask.window) for ask in asks])
        self.seeds += [int(seed) for ask in asks for seed in ask.window.seeds]
        return [self._planner.decide(ask.window) for ask in asks]

    def clock(self) -> float:
        return self.now


def ask(rows: int = 1, seed: int = 0) -> PlanRequest:
    return PlanRequest(window=windows([4] * rows, seed=seed))


def plain(asks: Sequence[PlanRequest]) -> list[Decision]:
    planner = FakePlanner(2)
    return [planner.decide(each.window) for each in asks]


def open_batcher(
    answer: Callable[[Sequence[PlanRequest]], Sequence[Decision]], **changes: Any
) -> Batcher:
    options: dict[str, Any] = {"rows": 8, "wait": 0.0, "queue": 64, "recorder": Recorder()}
    check = changes.pop("check", lambda ask: None)
    return Batcher(answer, check, **options | changes)


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    found = Stepped()
    yield found
    found.go_on.release(1000)  # whatever still waits


def decision(reply: "Future[PlanReply]") -> Decision:
    found = reply.result(SECONDS)
    assert isinstance(found, Decision), found
    return found


def refusal(reply: "Future[PlanReply]") -> Rejection:
    found = reply.result(SECONDS)
    assert isinstance(found, Rejection)
    return found


def busy(batcher: Batcher, stepped: Stepped) -> "Future[PlanReply]":
    """A first request that is being computed."""
    first = batcher.submit(ask(), 60)
    assert stepped.begun.acquire(timeout=SECONDS)
    return first


def test_whoever_comes_during_a_batch_shares_the_next_one(stepped: Stepped) -> None:
    with open_batcher(stepped.answer) as batcher:
        replies = [busy(batcher, stepped)]
        replies += [batcher.submit(ask(seed=n), 60) for n in range(1, 6)]
        stepped.go_on.release(2)
        found = [decision(reply) for reply in replies]
    assert stepped.batches == [[1], [1] * 5]
    for n, each in enumerate(found):
        np.testing.assert_array_equal(each.actions, plain([ask(seed=n)])[0].actions)


def test_a_batch_has_no_more_rows_than_it_may(stepped: Stepped) -> None:
    with open_batcher(stepped.answer, rows=8) as batcher:
        replies = [busy(batcher, stepped)]
        replies += [batcher.submit(ask(rows), 60) for rows in (3, 5, 4, 5, 20, 1)]
        stepped.go_on.release(10)
        assert [len(decision(reply).actions) for reply in replies] == [1, 3, 5, 4, 5, 20, 1]
    assert stepped.batches == [[1], [3, 5], [4], [5], [20], [1]]


def test_a_full_batch_does_not_wait(stepped: Stepped) -> None:
    with open_batcher(stepped.answer, rows=8, wait=1000.0) as batcher:
        replies = [batcher.submit(ask(4), 60), batcher.submit(ask(4), 60)]
        stepped.go_on.release()
        wait(replies, SECONDS)
        assert [len(decision(reply).actions) for reply in replies] == [4, 4]
    assert stepped.batches == [[4, 4]]


def test_a_batch_waits_for_company_and_not_longer(stepped: Stepped) -> None:
    with open_batcher(stepped.answer, wait=0.02, clock=stepped.clock) as batcher:
        replies = [batcher.submit(ask(), 60)]
        assert not stepped.begun.acquire(timeout=0.1), "no time has passed on its clock"
        replies.append(batcher.submit(ask(), 60))
        assert not stepped.begun.acquire(timeout=0.1)
        stepped.now = 0.03
        stepped.go_on.release()
        assert [decision(reply).version for reply in replies] == [3, 3]
    assert stepped.batches == [[1, 1]]


def test_more_than_the_queue_holds_are_told_to_come_later(stepped: Stepped) -> None:
    recorder = Recorder()
    with open_batcher(stepped.answer, queue=4, recorder=recorder) as batcher:
        first = busy(batcher, stepped)
        waiting = [batcher.submit(ask(3), 60), batcher.submit(ask(), 60)]
        late = batcher.submit(ask(), 60)
        assert late.done() and not first.done()
        assert refusal(late).why == RejectReason.RETRY_LATER
        assert refusal(late).wait > 0
        assert telemetry.value(recorder.snapshot(), catalogue.QUEUE_ROWS) == 4
        stepped.go_on.release(2)
        assert [len(decision(reply).actions) for reply in [first, *waiting]] == [1, 3, 1]
        stepped.go_on.release()
        assert decision(batcher.submit(ask(), 60)).version == 3, "there is place again"
    assert telemetry.value(recorder.snapshot(), catalogue.QUEUE_ROWS) == 0


@pytest.mark.parametrize("rows", [0, 5])
def test_a_request_that_never_fits_is_bad(rows: int) -> None:
    with open_batcher(plain, queue=4) as batcher:
        found = refusal(batcher.submit(ask(rows), 60))
    assert (found.why, f"has {rows} rows" in found.reason) == (RejectReason.BAD, True)


def test_what_came_too_late_is_not_computed(stepped: Stepped) -> None:
    with open_batcher(stepped.answer, clock=stepped.clock) as batcher:
        first = busy(batcher, stepped)
        short, long = batcher.submit(ask(seed=1), 5), batcher.submit(ask(seed=2), 60)
        stepped.now = 5.0
        stepped.go_on.release(2)
        assert refusal(short).why == RejectReason.LATE
        assert decision(first).version == decision(long).version == 3
    assert stepped.seeds == [0, 20]


def test_what_nobody_waits_for_any_more_is_not_computed(stepped: Stepped) -> None:
    recorder = Recorder()
    with open_batcher(stepped.answer, recorder=recorder) as batcher:
        busy(batcher, stepped)
        left, kept = batcher.submit(ask(seed=1), 60), batcher.submit(ask(seed=2), 60)
        assert left.cancel()
        stepped.go_on.release(2)
        decision(kept)
    assert stepped.seeds == [0, 20]
    assert telemetry.value(recorder.snapshot(), catalogue.REQUESTS, "late") == 1


def picky(each: PlanRequest) -> None:
    if each.mode == "nonsense":
        raise InputError("mode is nonsense")


def test_a_bad_request_is_answered_alone(stepped: Stepped) -> None:
    bad = PlanRequest(window=windows([4]), mode="nonsense")
    with open_batcher(stepped.answer, check=picky) as batcher:
        replies = [busy(batcher, stepped), batcher.submit(ask(seed=1), 60)]
        found = refusal(batcher.submit(bad, 60))
        replies.append(batcher.submit(ask(seed=2), 60))
        stepped.go_on.release(2)
        for n, reply in enumerate(replies):
            np.testing.assert_array_equal(decision(reply).actions, plain([ask(seed=n)])[0].actions)
    assert (found.why, found.reason) == (RejectReason.BAD, "mode is nonsense")
    assert stepped.batches == [[1], [1, 1]]


class Failing(Stepped):
    """Fails on batches with certain seeds in them."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__()
        self.errors, self.calls = errors, 0

    def answer(self, asks: Sequence[PlanRequest]) -> list[Decision]:
        found = super().answer(asks)
        self.calls += 1
        for each in asks:
            if error := self.errors.get(int(each.window.seeds[0])):
                raise error
        return found


def test_a_batch_that_fails_is_tried_request_by_request() -> None:
    failing = Failing({10: RuntimeError("no luck"), 30: InputError("other sizes")})
    failing.go_on.release(100)
    recorder = Recorder()
    with open_batcher(failing.answer, rows=4, wait=1000.0, recorder=recorder) as batcher:
        replies = [batcher.submit(ask(seed=n), 60) for n in range(4)]
        good = [decision(replies[n]) for n in (0, 2)]
        bad = [refusal(replies[n]) for n in (1, 3)]
    assert [each.why for each in bad] == [RejectReason.FAILED, RejectReason.BAD]
    assert "no luck" in bad[0].reason
    for n, each in zip((0, 2), good, strict=True):
        np.testing.assert_array_equal(each.actions, plain([ask(seed=n)])[0].actions)
    assert failing.batches == [[1] * 4, [1], [1], [1], [1]]
    counted = recorder.snapshot()[catalogue.REQUESTS.name]
    assert counted["ok"] == [2] and counted["failed"] == counted["bad"] == [1]


def test_a_request_that_fails_alone_is_not_tried_again() -> None:
    failing = Failing({0: RuntimeError("no luck")})
    failing.go_on.release(100)
    with open_batcher(failing.answer) as batcher:
        assert refusal(batcher.submit(ask(), 60)).why == RejectReason.FAILED
    assert failing.calls == 1


def test_too_few_decisions_are_a_failure_of_all() -> None:
    with open_batcher(lambda asks: plain(asks)[1:], rows=2, wait=1000.0) as batcher:
        replies = [batcher.submit(ask(seed=n), 60) for n in range(2)]
        assert [refusal(reply).why for reply in replies] == [RejectReason.FAILED] * 2


def test_an_action_that_is_not_finite_is_not_handed_out() -> None:
    def overflowing(asks: Sequence[PlanRequest]) -> list[Decision]:
        found = plain(asks)
        found[1].actions[0, 1] = np.nan
        return found

    with open_batcher(overflowing, rows=2, wait=1000.0) as batcher:
        good, bad = (batcher.submit(ask(seed=n), 60) for n in range(2))
        assert np.isfinite(decision(good).actions).all()
        assert refusal(bad).why == RejectReason.BAD


class Small:
    """A device that has room for a few rows only."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.batches: list[int] = []

    def answer(self, asks: Sequence[PlanRequest]) -> list[Decision]:
        self.batches.append(sum(len(each.window) for each in asks))
        if self.batches[-1] > self.room:
            raise MemoryError("no room")
        return plain(asks)


def test_a_batch_without_room_is_computed_in_smaller_ones() -> None:
    device, recorder = Small(room=4), Recorder()
    with open_batcher(device.answer, rows=8, wait=1000.0, recorder=recorder) as batcher:
        replies = [batcher.submit(ask(rows, seed=n), 60) for n, rows in enumerate((3, 4, 1))]
        for n, (rows, reply) in enumerate(zip((3, 4, 1), replies, strict=True)):
            found, expected = decision(reply), plain([ask(rows, seed=n)])[0]
            np.testing.assert_array_equal(found.actions, expected.actions)
            np.testing.assert_array_equal(found.target_returns, expected.target_returns)
        assert device.batches == [8, 3, 4, 1]
        replies = [batcher.submit(ask(4, seed=9), 60)]
        assert len(decision(replies[0]).actions) == 4, "4 rows are a full batch by now"
    assert device.batches[4:] == [4]
    assert telemetry.value(recorder.snapshot(), catalogue.OUT_OF_MEMORY) == 1


def test_a_large_request_without_room_is_cut() -> None:
    device = Small(room=4)
    with open_batcher(device.answer, rows=8) as batcher:
        found = decision(batcher.submit(ask(16), 60))
        again = decision(batcher.submit(ask(10), 60))
    np.testing.assert_array_equal(found.actions, plain([ask(16)])[0].actions)
    np.testing.assert_array_equal(again.actions, plain([ask(10)])[0].actions)
    assert device.batches == [16, 4, 4, 4, 4, 4, 4, 2]


def test_requests_come_through_once_halves_are_small_enough() -> None:
    device = Small(room=1)
    with open_batcher(device.answer, rows=8) as batcher:
        while isinstance(batcher.submit(ask(8), 60).result(SECONDS), Rejection):
            assert len(device.batches) < 20
    assert device.batches[-8:] == [1] * 8


def test_batches_grow_again_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.server.batcher.GROW_AFTER", 2)
    device = Small(room=4)
    with open_batcher(device.answer, rows=8) as batcher:
        decision(batcher.submit(ask(8), 60))
        device.room = 100
        for _ in range(8):
            decision(batcher.submit(ask(8), 60))
    assert device.batches == [8, 4, 4, 4, 4, 4, 4, 5, 3, 5, 3, 6, 2, 6, 2, 7, 1, 7, 1]


def test_a_swap_happens_between_two_batches(stepped: Stepped) -> None:
    newer = Stepped(version=4)
    newer.go_on.release(100)
    with open_batcher(stepped.answer) as batcher:
        first = busy(batcher, stepped)
        second = batcher.submit(ask(), 60)
        batcher.swap(newer.answer, lambda ask: None)
        third = batcher.submit(ask(), 60)
        stepped.go_on.release()
        assert [decision(reply).version for reply in (first, second, third)] == [3, 4, 4]
    assert (stepped.batches, newer.batches) == ([[1]], [[1, 1]])


def test_every_batch_is_of_one_version_while_versions_change() -> None:
    batches: list[set[int]] = []

    def version(number: int) -> Callable[[Sequence[PlanRequest]], list[Decision]]:
        def answer(asks: Sequence[PlanRequest]) -> list[Decision]:
            planner = FakePlanner(2, iter([number] * len(asks)))
            found = [planner.decide(each.window) for each in asks]
            batches.append({each.version for each in found})
            return found

        return answer

    with open_batcher(version(0)) as batcher:
        versions = []
        for number in range(1, 100):
            replies = [batcher.submit(ask(), 60) for _ in range(3)]
            batcher.swap(version(number), lambda ask: None)
            versions += [decision(reply).version for reply in replies]
    assert all(len(each) == 1 for each in batches)
    assert versions == sorted(versions) and versions[-1] >= 98


def test_a_batch_that_hangs_shows(stepped: Stepped) -> None:
    with open_batcher(stepped.answer, clock=stepped.clock) as batcher:
        assert batcher.stuck_for() == 0
        first = busy(batcher, stepped)
        stepped.now = 31.0
        assert batcher.stuck_for() == 31
        stepped.go_on.release()
        decision(first)
        assert batcher.stuck_for() == 0


def test_closing_answers_everybody(stepped: Stepped) -> None:
    batcher = open_batcher(stepped.answer)
    first, second = busy(batcher, stepped), batcher.submit(ask(), 60)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    stepped.go_on.release()
    closing.join(SECONDS)
    assert decision(first).version == 3
    assert refusal(second).why == refusal(batcher.submit(ask(), 60)).why == RejectReason.FAILED
    assert not batcher.alive


def test_closing_while_a_batch_hangs_answers_everybody(stepped: Stepped) -> None:
    batcher = open_batcher(stepped.answer)
    replies = [busy(batcher, stepped), batcher.submit(ask(), 60)]
    batcher.close(timeout=0.05)
    assert [refusal(reply).why for reply in replies] == [RejectReason.FAILED] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_died() -> None:
    def deadly(asks: Sequence[PlanRequest]) -> list[Decision]:
        raise SystemExit

    batcher = open_batcher(deadly, rows=2, wait=1000.0)
    replies = [batcher.submit(ask(), 60) for _ in range(2)]
    assert [refusal(reply).why for reply in replies] == [RejectReason.FAILED] * 2
    batcher.close()
    assert refusal(batcher.submit(ask(), 60)).why == RejectReason.FAILED


def test_what_was_done_is_counted(stepped: Stepped) -> None:
    recorder = Recorder()
    with open_batcher(stepped.answer, recorder=recorder, clock=stepped.clock) as batcher:
        replies = [busy(batcher, stepped), *(batcher.submit(ask(2), 60) for _ in range(3))]
        stepped.now = 4.0
        stepped.go_on.release(2)
        wait(replies, SECONDS)
    found = recorder.snapshot()
    assert found[catalogue.REQUESTS.name] == {"ok": [4]}
    assert telemetry.value(found, catalogue.PLANNER_BUSY) == 4
    assert telemetry.mean(found, catalogue.BATCH_ROWS) == 3.5
    assert telemetry.mean(found, catalogue.PLAN_SECONDS, "queue") == 3
    assert telemetry.mean(found, catalogue.PLAN_SECONDS, "compute") == 1
    assert telemetry.mean(found, catalogue.PLAN_SECONDS, "total") == 4
