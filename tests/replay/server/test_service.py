"""The store as it is served: every episode counts once, and both sides keep the ratio."""

import errno
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3pc.config.schema import FleetConfig, OnlineConfig
from m3pc.telemetry.catalogue import (
    APPEND_SECONDS,
    APPENDS,
    DISK_FREE,
    INSERTED,
    LIMITER_ERROR,
    REPLAY_BYTES,
    REPLAY_STEPS,
    WRITER_BLOCKED,
)
from m3pc.telemetry.recorder import value
from m3pc.types import Ack, AckStatus, AppendKey, FencedError
from replay.format.payload import encode
from replay.server.service import StoreService, writer_options
from replay.store.store import Store
from replay.writing.manifest_writer import BrokenStoreError
from replay.writing.writer import Writer, WriterOptions
from tests.support.episodes.episodes import header, numbered
from tests.support.faults.live_writer import ROOMY
from tests.support.faults.sim_fs import Loss, SimFS

MAX_STEPS = 40
HEADER = header(max_episode_steps=MAX_STEPS)
ONLINE = OnlineConfig(updates_per_step=0.2, updates_per_episode=0, slack=20)
FLEET = FleetConfig()
SOON = 30.0  # seconds: only a failure waits so long
ROOT = Path("/disk")


def service(path: Path, online: OnlineConfig = ONLINE, **more: Any) -> StoreService:
    plain: dict[str, Any] = {"options": ROOMY, "wait": 0.0}
    return StoreService(path, HEADER, online, FLEET, **(plain | more))


def payload(number: int, length: int = 10) -> bytes:
    return encode(numbered(number, length, terminated=number % 3 == 0))


def fill(served: StoreService, count: int) -> list[Ack]:
    """Episodes of ten steps."""
    return [served.append(AppendKey(0, 0, number), payload(number)) for number in range(count)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# Counting


def test_a_duplicate_a_gap_and_invalid_data_are_not_counted(path: Path) -> None:
    with service(path) as served:
        keys = [AppendKey(0, 0, sequence) for sequence in (0, 0, 2, 1, 0)]
        statuses = [served.append(key, payload(key.sequence)).status for key in keys]
        invalid = served.append(AppendKey(1, 0, 0), b"invalid" * 20)
        assert (*statuses, invalid.status) == (
            AckStatus.DURABLE,
            AckStatus.DUPLICATE,
            AckStatus.GAP,
            AckStatus.DURABLE,
            AckStatus.DUPLICATE,
            AckStatus.REJECTED,
        )
        assert served.rate_limiter.ratio.inserts == 20
        assert (served.totals().episodes, served.totals().steps) == (2, 20)


def test_the_same_episode_twice_at_once_is_counted_once(path: Path) -> None:
    with service(path, ONLINE.model_copy(update={"slack": 1000})) as served:
        release = threading.Event()
        with ThreadPoolExecutor(5) as threads:
            held = threads.submit(served.committer.call, lambda _: wait_for(release))
            key, content = AppendKey(0, 0, 0), payload(0)
            calls = [threads.submit(served.append, key, content) for _ in range(4)]
            until(lambda: served.rate_limiter.reserved == 40)
            release.set()
            statuses = [call.result(SOON).status for call in calls]
            held.result(SOON)
        assert sorted(statuses) == [*[AckStatus.DUPLICATE] * 3, AckStatus.DURABLE]
        assert (served.rate_limiter.ratio.inserts, served.rate_limiter.reserved) == (10, 0)


def wait_for(event: threading.Event) -> None:
    assert event.wait(SOON)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_retention_drops_and_an_operator_withdraws_still_counts(path: Path) -> None:
    online = ONLINE.model_copy(update={"slack": 1000})
    options = replace(ROOMY, segment_bytes=2000, keep_episodes=3)
    with service(path, online, options=options) as served:
        assert {ack.status for ack in fill(served, 20)} == {AckStatus.DURABLE}
        served.committer.call(lambda writer: writer.withdraw_producer(0))
        before = served.totals()
        assert (before.episodes, before.steps) == (20, 200)
        assert (before.terminated, before.truncated, before.aborted) == (7, 13, 0)
        assert 30 <= before.held_steps < 200
        assert served.report()["m3pc_replay_transitions"][""] == [before.held_steps]
    with service(path, online, options=options) as again:
        assert again.rate_limiter.ratio.inserts == 200
        after = again.totals()
        assert (after.episodes, after.steps, after.terminated) == (20, 200, 7)
        assert after.held_steps == before.held_steps == Store(path).totals.steps


class Model:
    """What a store must hold, in plain words; and the store beside it, on a disk in memory."""

    OPTIONS = replace(ROOMY, segment_bytes=3000, keep_episodes=4)

    def __init__(self, online: OnlineConfig) -> None:
        self.fs, self.online = SimFS(ROOT), online
        self.lengths: dict[AppendKey, int] = {}
        self.done = self.epoch = 0
        self.store = self.open()

    def open(self) -> StoreService:
        return service(ROOT / "store", self.online, fs=self.fs, options=self.OPTIONS)

    def next(self, slot: int) -> AppendKey:
        return AppendKey(slot, 0, sum(key.slot == slot for key in self.lengths))

    def append(self, slot: int, length: int, ahead: int = 0) -> None:
        """`ahead`: 0 is the next, below it was sent before, above it leaves a gap."""
        first = self.next(slot)
        key = AppendKey(slot, 0, max(first.sequence + ahead, 0))
        status = self.store.append(key, payload(key.sequence, length)).status
        if key.sequence < first.sequence:
            assert status is AckStatus.DUPLICATE
        elif key.sequence > first.sequence:
            assert status is AckStatus.GAP
        else:
            assert status in (AckStatus.DURABLE, AckStatus.RETRY_LATER)
            if status is AckStatus.DURABLE:
                self.lengths[key] = length
                ratio = self.store.rate_limiter.ratio
                assert ratio.error <= ratio.limits.max_diff

    def append_late(self, slot: int, length: int, *, crash: bool) -> None:
        """No reply comes in time: then it is stored after all, or the power fails before."""
        key = self.next(slot)
        before = self.store
        committer = before.committer
        deadline = committer.deadline

        def held(_: Writer) -> None:
            committer.deadline = 0.001
            assert before.append(key, payload(key.sequence, length)).status is AckStatus.RETRY_LATER
            committer.deadline = deadline
            if crash:
                self.fs = self.fs.after(Loss(random.Random(0)))

        committer.call(held)
        stored = committer.writer.totals.episodes > len(self.lengths)
        reserved = before.rate_limiter.reserved > 0 or stored
        until(lambda: before.rate_limiter.reserved == 0)
        if crash:
            before.close()
            self.store = self.open()
        elif reserved:
            self.lengths[key] = length

    def update(self, more: int) -> None:
        allowed = self.store.may_update(self.epoch, self.done, self.done + more, 0)
        assert self.store.may_update(self.epoch, self.done, self.done + more, 0) == allowed
        assert allowed <= self.done + more
        limiter = self.store.rate_limiter.ratio
        assert limiter.error >= limiter.limits.min_diff
        self.done = max(self.done, allowed)

    def restart_learner(self, lost: int) -> None:
        self.epoch, self.done = self.epoch + 1, max(self.done - lost, 0)
        assert self.store.may_update(self.epoch, self.done, self.done, 0) == self.done
        assert self.store.rate_limiter.ratio.samples == self.done

    def crash(self) -> None:
        old, self.fs = self.store, self.fs.after(Loss(random.Random(len(self.lengths))))
        old.close()
        self.store = self.open()

    def check(self) -> None:
        steps, episodes = sum(self.lengths.values()), len(self.lengths)
        per_step, per_episode = self.online.updates_per_step, self.online.updates_per_episode
        limits = self.store.rate_limiter.ratio.limits
        owed = self.store.rate_limiter.ratio.inserts * limits.samples_per_insert
        assert float(owed) == pytest.approx(steps * per_step + episodes * per_episode)
        totals = self.store.totals()
        assert (totals.episodes, totals.steps) == (episodes, steps)


slots, lengths = st.integers(0, 2), st.integers(1, MAX_STEPS)
CHANGES = st.one_of(
    st.tuples(st.just("append"), slots, lengths),
    st.tuples(st.just("append"), slots, lengths, st.integers(-2, 2)),
    st.tuples(st.just("late"), slots, lengths),
    st.tuples(st.just("late and crash"), slots, lengths),
    st.tuples(st.just("update"), st.integers(0, 20)),
    st.tuples(st.just("restart_learner"), st.integers(0, 10)),
    st.tuples(st.just("crash")),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(0.2, 0), (0.5, 3), (0.0, 7)]), st.lists(CHANGES, max_size=30))
def test_inserts_are_what_the_store_holds_whatever_happens(
    rates: tuple[float, int], changes: list[tuple[Any, ...]]
) -> None:
    per_step, per_episode = rates
    model = Model(
        OnlineConfig(updates_per_step=per_step, updates_per_episode=per_episode, slack=30)
    )
    for name, *values in changes:
        if name.startswith("late"):
            model.append_late(*values, crash=name.endswith("crash"))
        else:
            getattr(model, name)(*values)
        model.check()
    model.store.close()


# Waiting


def test_producers_wait_for_a_learner_that_stops_and_go_on_with_it(path: Path) -> None:
    with service(path) as served:
        statuses = [ack.status for ack in fill(served, 5)]
        assert statuses == [*[AckStatus.DURABLE] * 3, AckStatus.RETRY_LATER, AckStatus.GAP]
        key = AppendKey(0, 0, 3)
        assert served.append(key, payload(3)).status is AckStatus.RETRY_LATER
        assert served.totals().episodes == 3
        assert (
            served.may_update(1, 0, 1, 0) == 1
        )  # six are owed; at five there is room for the longest
        assert served.append(key, payload(3)).status is AckStatus.DURABLE
        key = AppendKey(0, 0, 4)
        for updates in (2, 3):  # the two that ten steps owe
            assert served.append(key, payload(4)).status is AckStatus.RETRY_LATER
            assert served.may_update(1, updates - 1, updates, 0) == updates
        assert served.append(key, payload(4)).status is AckStatus.DURABLE


def test_a_store_that_is_closed_twice_was_closed_in_order(path: Path) -> None:
    served = service(path)
    fill(served, 2)
    served.close()
    served.close()
    with service(path) as again:
        assert again.totals().episodes == 2


def test_a_learner_never_does_more_than_is_owed(path: Path) -> None:
    with service(path) as served:
        assert served.may_update(1, 0, 5, 0) == 0
        fill(served, 1)
        assert served.may_update(1, 0, 5, 0) == 2
        assert served.may_update(1, 0, 5, 0) == 2


def test_a_store_that_comes_back_grants_what_is_owed_also_to_a_learner_that_may_go_on_alone(
    path: Path,
) -> None:
    online = OnlineConfig(
        updates_per_step=0.2, updates_per_episode=0, slack=20, without_actors="continue_offline"
    )
    with service(path, online) as served:
        assert served.may_update(1, 0, 16, 0) == 0
        fill(served, 2)
        assert served.may_update(1, 0, 16, 0) == 4
    for epoch in (1, 1, 2):  # the same learner, and one that comes back with it
        with service(path, online) as served:
            assert [served.may_update(epoch, 4, 20, 0) for _ in range(2)] == [4, 4]


def test_a_blocked_append_is_reported_and_then_released(path: Path) -> None:
    with service(path, wait=SOON) as served, ThreadPoolExecutor(1) as thread:
        fits = int(served.rate_limiter.ratio.limits.max_diff * 5 - MAX_STEPS) // 10 + 1
        assert {ack.status for ack in fill(served, fits)} == {AckStatus.DURABLE}
        blocked = thread.submit(served.append, AppendKey(1, 0, 0), payload(0))
        until(lambda: served.rate_limiter.waiting == 1 or blocked.done())
        assert value(served.report(), WRITER_BLOCKED) == 1
        assert served.may_update(1, 0, 2) == 2
        assert blocked.result(SOON).status is AckStatus.DURABLE
        assert value(served.report(), WRITER_BLOCKED) == 0


def test_four_producers_and_a_learner_keep_the_ratio(path: Path) -> None:
    """Every reply may be lost: a caller that got none sends or asks again."""
    online = OnlineConfig(updates_per_step=0.2, updates_per_episode=1, slack=50)
    sent = {slot: [1 + (7 * slot + 13 * k) % MAX_STEPS for k in range(30)] for slot in range(4)}
    steps = sum(map(sum, sent.values()))
    owed = (steps + 5 * 120) // 5
    with service(path, online, wait=0.2) as served, ThreadPoolExecutor(5) as threads:

        def produce(slot: int) -> None:
            rng = random.Random(slot)
            for k, length in enumerate(sent[slot]):
                until_stored(served, AppendKey(slot, 0, k), payload(k, length), rng)

        def learn() -> int:
            done, limits = 0, served.rate_limiter.ratio.limits
            while done < owed:
                done = max(done, served.may_update(1, done, min(done + 7, owed)))
                assert limits.min_diff <= served.rate_limiter.ratio.error <= limits.max_diff
            return done

        producers = [threads.submit(produce, slot) for slot in sent]
        assert threads.submit(learn).result(2 * SOON) == owed
        for producer in producers:
            producer.result(SOON)
        limiter, totals = served.rate_limiter.ratio, served.totals()
    assert (totals.episodes, totals.steps) == (120, steps)
    assert (limiter.inserts, limiter.samples) == (steps + 5 * 120, owed)
    assert 0 <= limiter.error < 1
    assert sorted(Store(path).keys) == [AppendKey(s, 0, k) for s in sent for k in range(30)]


def until_stored(served: StoreService, key: AppendKey, content: bytes, rng: random.Random) -> None:
    heard = False
    end = time.monotonic() + SOON
    while not heard:
        assert time.monotonic() < end
        status = served.append(key, content).status
        assert status in (AckStatus.DURABLE, AckStatus.DUPLICATE, AckStatus.RETRY_LATER)
        heard = status is not AckStatus.RETRY_LATER and rng.random() < 0.7


def test_a_learner_of_an_older_epoch_is_refused(path: Path) -> None:
    with service(path) as served:
        fill(served, 1)
        assert served.may_update(2, 0, 1) == 1
        with pytest.raises(FencedError):
            served.may_update(1, 0, 1)


def test_more_slack_admits_a_waiting_append(path: Path) -> None:
    with service(path) as served:
        stored = [ack.status for ack in fill(served, 10)].count(AckStatus.DURABLE)
        served.set_slack(100)
        assert served.append(AppendKey(0, 0, stored), payload(0)).status is AckStatus.DURABLE


# Being a part of a run


def test_a_report_says_what_became_of_appends(path: Path) -> None:
    with service(path) as served:
        fill(served, 2)
        served.append(AppendKey(0, 0, 0), payload(0))
        report = served.report()
        assert value(report, APPENDS, "durable") == 2
        assert value(report, APPENDS, "duplicate") == 1
        assert sum(report[APPEND_SECONDS.name][""][:-1]) == 3
        assert value(report, INSERTED) == value(report, REPLAY_STEPS) == 20
        assert value(report, REPLAY_BYTES) == (path / "log" / "000000.log").stat().st_size
        assert value(report, LIMITER_ERROR) == 4.0
        assert value(report, DISK_FREE) > 0
        assert value(served.report(), INSERTED) == 20  # a total: asking again adds nothing
    with service(path) as again:
        report = again.report()
        assert (value(report, INSERTED), value(report, REPLAY_STEPS)) == (0, 20)


def test_a_broken_store_shows_in_every_call_and_its_successor_has_all() -> None:
    fs = SimFS(ROOT)
    served = service(ROOT / "store", fs=fs)
    assert fill(served, 1)[0].status is AckStatus.DURABLE
    fs.fails_at = dict.fromkeys(range(fs.calls, fs.calls + 100), errno.EIO)
    calls: list[Callable[[], object]] = [
        lambda: served.append(AppendKey(0, 0, 1), payload(1)),
        lambda: served.append(AppendKey(0, 0, 0), payload(0)),
        lambda: served.may_update(1, 0, 1),
        served.totals,
        served.report,
    ]
    for call in calls:
        with pytest.raises(BrokenStoreError):
            call()
    served.close()
    fs.fails_at = {}
    with service(ROOT / "store", fs=fs) as again:
        assert again.append(AppendKey(0, 0, 0), payload(0)).status is AckStatus.DUPLICATE
        assert again.rate_limiter.ratio.inserts == 10 * again.totals().episodes


def test_no_thread_is_left(path: Path) -> None:
    before = threading.active_count()
    with service(path):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_the_writer_is_opened_as_the_fleet_says() -> None:
    fleet = FleetConfig(durability="os", keep_episodes=7)
    assert writer_options(fleet) == WriterOptions(
        durability="os", segment_bytes=16 << 20, keep_episodes=7, keep_bytes=None
    )
    assert writer_options(FleetConfig()).keep_episodes is None


def test_waits_end_before_the_deadline_of_the_caller(path: Path) -> None:
    fleet = FleetConfig(deadline=0.4)
    with StoreService(path, HEADER, ONLINE, fleet, options=ROOMY) as served:
        assert served.max_wait + served.committer.deadline < fleet.deadline
