"""Robots while the disk is slow, full or broken: nothing is stored twice, and no robot waits for
another robot's episode."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from actors.outbox import Outbox
from m3pc.model.weights import Weights
from m3pc.serving.recording import EpisodeRecording, RecordingLimits, StoreBusyError, StoreResult
from m3pc.serving.sessions import Session, SessionConfig, Sizes
from m3pc.telemetry.catalogue import SERVED_EPISODES
from m3pc.telemetry.recorder import value
from m3pc.types import Ack, AckStatus, AppendKey, Episode
from replay.store.store import Store
from replay.writing.group_commit import GroupCommitter
from tests.support.faults.faulty_disk import FaultyDisk, recording_on
from tests.support.servers.served import (
    ACTIONS,
    STATES,
    Clock,
    InProcessServer,
    in_process,
    problem,
    step_answer,
    weights,
)
from tests.support.servers.waiting import PATIENCE, eventually


def stored(path: Path) -> list[tuple[int, bool]]:
    """Steps of each episode, and whether the task ended it."""
    return [(len(episode), episode.terminated) for episode in Store(path).episodes()]


class ControlledRecording(EpisodeRecording):
    """Holds episodes until `go_on`, and fails as often as the test says."""

    def __init__(self, path: Path, weights: Weights, *, only: str | None = None) -> None:
        """`only`: hold those of this robot."""
        super().__init__(path, weights)
        self.only, self.started = only, 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.failures: list[Exception] = []

    def store(self, name: str | None, episode: Episode) -> StoreResult:
        self._control(name)
        return super().store(name, episode)

    def store_later(
        self, name: str | None, episode: Episode, put_seconds: float | None = None
    ) -> None:
        self._control(name)
        super().store_later(name, episode, put_seconds)

    def _control(self, name: str | None) -> None:
        if self.only in (None, name):
            self.started += 1
            assert self.go_on.wait(PATIENCE)
        if self.failures:
            raise self.failures.pop()


def control(served: InProcessServer) -> ControlledRecording:
    assert isinstance(served.recording, ControlledRecording)
    return served.recording


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


# Robots that open, act and end while something is stored


def test_a_repeated_opening_keeps_its_session_while_the_old_episode_is_stored(
    tmp_path: Path,
) -> None:
    """Neither request waits for the disk."""
    with in_process(record=tmp_path / "store", open_recording=ControlledRecording) as served:
        served.walk(served.opened(name="arm"), 10)
        recording = control(served)
        recording.go_on.clear()
        first = served.opened(name="arm", key="one")
        again = served.opened(name="arm", key="one")
        assert again == first
        served.walk(again, 3)
        assert eventually(lambda: recording.started == 1)
        recording.go_on.set()
    assert stored(tmp_path / "store") == [(9, False)]


def test_a_key_is_for_one_message_and_is_forgotten_eventually() -> None:
    with in_process(max_sessions=10, service_options={"max_remembered": 2}) as served:
        first = served.opened(key="one", seed=1)
        response = served.client.post("/v1/sessions", json={"key": "one", "seed": 2})
        assert "key was sent before with another message" in problem(response, 409)["detail"]
        for key in ("two", "three"):
            assert served.opened(key=key) != first
        second = served.opened(key="one", seed=1)
        assert second != first, "the oldest was forgotten"
        assert served.opened(key="one", seed=1) == second


def test_active_sessions_survive_while_others_are_stored(tmp_path: Path) -> None:
    clock = Clock()
    with in_process(
        record=tmp_path / "store", open_recording=holding("gone"), clock=clock, idle_seconds=60.0
    ) as served:
        names = {name: served.opened(name=name) for name in ("gone", "ends", "goes-on")}
        for session in names.values():
            served.walk(session, 10)
        recording = control(served)
        recording.go_on.clear()
        clock.now += 59
        served.client.get(f"/v1/sessions/{names['ends']}")
        served.client.get(f"/v1/sessions/{names['goes-on']}")
        clock.now += 1
        served.run(served.service.abandon_idle)
        assert eventually(lambda: recording.started == 1)
        assert served.end(names["ends"], 10, 9.0, terminated=True).json()["stored"] == "durable"
        clock.now += 59
        assert served.act(names["goes-on"], 10, 9.0).status_code == 200
        clock.now += 1
        served.run(served.service.abandon_idle)
        assert served.act(names["goes-on"], 11, 9.0).status_code == 200
        assert served.end(names["ends"], 10, 9.0, terminated=True).status_code == 200
        recording.go_on.set()
        assert served.end(names["goes-on"], 12, 9.0).status_code == 200
    assert sorted(stored(tmp_path / "store")) == [(9, False), (10, True), (12, False)]


def holding(name: str) -> Callable[[Path, Weights], ControlledRecording]:
    """Recordings that hold the episodes of one robot."""
    return lambda path, weights: ControlledRecording(path, weights, only=name)


def test_idle_sessions_end_at_once_and_are_stored_once(tmp_path: Path) -> None:
    """However long it takes to store the first of them."""
    clock = Clock()
    with in_process(
        record=tmp_path / "store", open_recording=holding("a"), clock=clock, idle_seconds=60.0
    ) as served:
        idle = [served.opened(name=name) for name in ("a", "b", "c")]
        for session in idle:
            served.walk(session, 10)
        recording = control(served)
        recording.go_on.clear()
        clock.now += 60
        served.run(served.service.abandon_idle)
        assert eventually(lambda: recording.started == 1)
        problem(served.end(idle[1], 10, 9.0, terminated=True), 409)
        problem(served.act(idle[2], 10, 9.0), 409)
        recording.go_on.set()
    assert stored(tmp_path / "store") == [(9, False)] * 3


def test_a_session_whose_end_is_being_stored_is_not_idle(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """If that fails, its robot may send the end again."""
    clock = Clock()
    with in_process(
        record=tmp_path / "store",
        open_recording=ControlledRecording,
        clock=clock,
        idle_seconds=60.0,
    ) as served:
        session = served.opened(name="arm")
        served.walk(session, 10)
        recording = control(served)
        recording.go_on.clear()
        recording.failures.append(StoreBusyError("not now"))
        ended = pool.submit(served.end, session, 10, 9.0, terminated=True)
        assert eventually(lambda: recording.started == 1)
        clock.now += 61
        served.run(served.service.abandon_idle)
        recording.go_on.set()
        problem(ended.result(PATIENCE), 503)
        assert served.end(session, 10, 9.0, terminated=True).json()["stored"] == "durable"
    assert stored(tmp_path / "store") == [(10, True)]


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_is_stored_even_if_its_session_is_replaced_meanwhile(
    tmp_path: Path, pool: ThreadPoolExecutor, fails: bool
) -> None:
    with in_process(record=tmp_path / "store", open_recording=ControlledRecording) as served:
        session = served.opened(name="arm")
        served.walk(session, 10)
        recording = control(served)
        recording.go_on.clear()
        recording.failures += [StoreBusyError("not now")] if fails else []
        ended = pool.submit(served.end, session, 10, 9.0, terminated=True)
        assert eventually(lambda: recording.started == 1)
        again = served.opened(name="arm")
        recording.go_on.set()
        assert ended.result(PATIENCE).status_code == (503 if fails else 200)
        assert served.act(again, 0).status_code == 200
    assert stored(tmp_path / "store") == [(10, True)]


def test_while_an_end_is_stored_only_the_same_end_is_accepted(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with in_process(record=tmp_path / "store", open_recording=ControlledRecording) as served:
        session = served.opened(name="arm")
        served.walk(session, 10)
        recording = control(served)
        recording.go_on.clear()
        ended = pool.submit(served.end, session, 10, 9.0, terminated=True)
        assert eventually(lambda: recording.started == 1)
        again = pool.submit(served.end, session, 10, 9.0, terminated=True)
        for response in (
            served.client.delete(f"/v1/sessions/{session}"),
            served.end(session, 10, -5.0, truncated=True),
            served.act(session, 10, 9.0),
        ):
            assert "is being ended" in problem(response, 409)["detail"]
        recording.go_on.set()
        assert ended.result(PATIENCE).json() == again.result(PATIENCE).json()
        counts = served.service.snapshot()
        assert value(counts, SERVED_EPISODES, "ended") == 1
        assert value(counts, SERVED_EPISODES, "dropped") == 0
    assert stored(tmp_path / "store") == [(10, True)]


# Outboxes


def test_there_may_be_more_names_than_outboxes(tmp_path: Path) -> None:
    """An outbox whose episodes are all stored makes room."""
    open_recording = recording_on(FaultyDisk(), limits=RecordingLimits(max_outboxes=2))
    with in_process(record=tmp_path / "store", open_recording=open_recording) as served:
        assert served.recording is not None
        for name in ("a", "b", "c", "a", "d"):
            session = served.opened(name=name)
            served.walk(session, 9)
            assert served.end(session, 9, 8.0).json()["stored"] == "durable"
            assert served.recording.outboxes <= 2
        threads = [thread for thread in threading.enumerate() if thread.name == "outbox"]
        assert len(threads) <= 2
    assert len(stored(tmp_path / "store")) == 5


def test_robots_beyond_the_outboxes_wait_while_nothing_is_stored(tmp_path: Path) -> None:
    disk, limits = FaultyDisk(), RecordingLimits(max_outboxes=1, ack_seconds=0.05)
    open_recording = recording_on(disk, limits=limits)
    with in_process(record=tmp_path / "store", open_recording=open_recording) as served:
        recording = served.recording
        assert recording is not None
        disk.full = True
        first, second = served.opened(name="first"), served.opened(name="second")
        served.walk(first, 9)
        served.walk(second, 9)
        assert served.end(first, 9, 8.0).json()["stored"] == "waiting"
        refusal = problem(served.end(second, 9, 8.0), 503)
        assert "episodes of 1 robots wait for the disk" in refusal["detail"]
        disk.full = False
        assert eventually(lambda: not recording.unacked)
        recording.limits = RecordingLimits(max_outboxes=1, ack_seconds=PATIENCE)
        assert served.end(second, 9, 8.0).json()["stored"] == "durable"
    assert len(stored(tmp_path / "store")) == 2


def test_metrics_and_other_robots_do_not_wait_for_a_full_outbox(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """An outbox holds 32 episodes; the next one waits for room."""
    disk, limits = FaultyDisk(), RecordingLimits(ack_seconds=0.0, put_seconds=PATIENCE)
    recording = recording_on(disk, limits=limits)(tmp_path / "store", weights())
    disk.full = True
    episode = nine_steps()
    for _ in range(32):
        assert recording.store("arm", episode).outcome == "waiting"
    blocked = pool.submit(recording.store, "arm", episode)
    assert not blocked.done()
    assert recording.snapshot()
    assert recording.store("leg", episode).outcome == "waiting"
    assert not blocked.done()
    disk.full = False
    assert blocked.result(PATIENCE).outcome in ("waiting", "durable")
    assert recording.close() == 0
    assert len(stored(tmp_path / "store")) == 34


def test_a_rejection_by_the_store_is_reported_to_a_waiting_robot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(committer: GroupCommitter, key: AppendKey, payload: bytes) -> Ack:
        return Ack(status=AckStatus.REJECTED, expected=0, durability="fsync", reason="too odd")

    monkeypatch.setattr(GroupCommitter, "append", reject)
    recording = EpisodeRecording(tmp_path / "store", weights())
    result = recording.store("arm", nine_steps())
    assert (result.outcome, result.reason) == ("rejected", "too odd")
    recording.store_later("arm", nine_steps())
    assert eventually(lambda: not recording.unacked)
    assert recording.close() == 1, "the second, of which no robot was informed"


def test_an_invalid_episode_is_rejected_or_counted_as_lost(tmp_path: Path) -> None:
    recording = EpisodeRecording(tmp_path / "store", weights())
    invalid = nine_steps(reward=float("nan"))
    result = recording.store("arm", invalid)
    assert result.outcome == "rejected" and "NaN" in result.reason
    recording.store_later("arm", invalid)
    assert recording.close() == recording.lost == 1


# Shutdown


def test_episodes_lost_without_a_waiting_robot_are_counted(tmp_path: Path) -> None:
    """The disk breaks while replaced sessions are stored, and the store stays broken."""
    disk = FaultyDisk()
    with in_process(
        record=tmp_path / "store", open_recording=recording_on(disk), max_sessions=9
    ) as served:
        recording = served.recording
        assert recording is not None
        for name in ("a", "b"):
            served.walk(served.opened(name=name), 10)
        disk.broken = True
        served.opened(name="a")
        assert eventually(lambda: recording.broken)
        served.opened(name="b")
        assert eventually(lambda: recording.lost == 1)
        assert served.stop() == 2, "that of a waits in its outbox"


def test_a_stop_with_a_full_disk_waits_for_all_robots_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread waits until all six are there, so one after another would fail."""
    disk, turn, flushes = FaultyDisk(), threading.Barrier(6), threading.Barrier(6)
    flush = Outbox.flush

    class InParallel(EpisodeRecording):
        def store_later(
            self, name: str | None, episode: Episode, put_seconds: float | None = None
        ) -> None:
            turn.wait(PATIENCE)
            super().store_later(name, episode, put_seconds)

    def flush_in_parallel(outbox: Outbox, seconds: float) -> int:
        flushes.wait(PATIENCE)
        return flush(outbox, seconds)

    def open_recording(path: Path, weights: Weights) -> EpisodeRecording:
        return InParallel(path, weights, fs=disk, limits=RecordingLimits(flush_seconds=0.5))

    monkeypatch.setattr(Outbox, "flush", flush_in_parallel)
    with in_process(
        record=tmp_path / "store", open_recording=open_recording, max_sessions=6
    ) as served:
        for name in "abcdef":
            served.walk(served.opened(name=name), 10)
        disk.full = True
        assert served.stop() == 6


def test_a_stop_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    seconds: list[float | None] = []

    class Timed(EpisodeRecording):
        def store_later(
            self, name: str | None, episode: Episode, put_seconds: float | None = None
        ) -> None:
            seconds.append(put_seconds)

    with in_process(
        record=tmp_path / "store", open_recording=Timed, service_options={"close_seconds": 0.0}
    ) as served:
        for name in "ab":
            served.walk(served.opened(name=name), 10)
        served.stop()
    assert seconds == [0.0, 0.0]


def test_a_broken_store_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with in_process(record=tmp_path / "store", open_recording=recording_on(disk)) as served:
        session = served.opened(name="arm")
        served.walk(session, 10)
        recording = served.recording
        assert recording is not None
        disk.broken = True
        recording.store_later("leg", nine_steps())
        assert eventually(lambda: recording.broken)
        refusal = problem(served.end(session, 10, 9.0), 503)
        assert "cannot be written any more" in refusal["detail"]
        ready = served.client.get("/readyz")
        assert ready.status_code == 503 and "store" in ready.text
        assert str(tmp_path) not in ready.text
        assert served.act(session, 10, 9.0).status_code == 200, "robots still get actions"
        assert served.stop() == 2


def test_a_store_that_breaks_while_it_is_waited_for_is_reported(tmp_path: Path) -> None:
    disk, limits = FaultyDisk(), RecordingLimits(ack_seconds=1.0)
    recording = recording_on(disk, limits=limits)(tmp_path / "store", weights())
    disk.broken = True
    with pytest.raises(OSError, match="cannot be written any more"):
        recording.store("arm", nine_steps())
    assert recording.broken
    assert recording.close() == 1


def nine_steps(*, reward: float = 1.0) -> Episode:
    sizes = Sizes(window=8, horizon=4, states=STATES, actions=ACTIONS)
    session = Session(SessionConfig(step_limit=40, deadline=1.0), sizes, record=True)
    for step in range(10):
        session.observe(step, np.full(STATES, step, np.float32), reward if step else None)
        session.record_answer(step_answer(step))
    episode = session.partial_episode()
    assert episode is not None
    return episode
