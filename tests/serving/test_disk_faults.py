"""Robots while the disk is slow, full or broken: nothing is stored twice, nobody waits for it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.serving import recording, session_service
from m3pc.serving.recording import EpisodeRecording, StoreBusyError
from m3pc.serving.sessions import Session, SessionConfig, Sizes
from m3pc.telemetry.catalogue import SERVED_EPISODES
from m3pc.telemetry.recorder import value
from m3pc.types import Ack, AckStatus, AppendKey, Episode
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.serving.test_sessions import answer
from tests.support.servers.served import ACTIONS, STATES, Clock, inside, problem, weights
from tests.support.servers.waiting import PATIENCE, eventually


def stored(path: Path) -> list[tuple[int, bool]]:
    """Steps of each episode, and whether the task ended it."""
    return [(len(each), each.terminated) for each in Store(path).episodes()]


class Slow:
    """A disk that takes what is sent to it when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, only: str | None = None) -> None:
        self.go_on, self.begun = threading.Event(), 0
        put = EpisodeRecording._put

        def later(found: EpisodeRecording, slot: int, *rest: Any) -> Any:
            if only is None or slot == recording.slot_of(only):
                self.begun += 1
                assert self.go_on.wait(PATIENCE)
            return put(found, slot, *rest)

        monkeypatch.setattr(EpisodeRecording, "_put", later)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "_make_room", lambda self: False)
        yield


# Who comes, goes and ends while something is stored


def test_a_robot_that_asks_again_to_come_back_keeps_what_it_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old episode is stored meanwhile: neither question waits for that."""
    with inside(record=tmp_path / "store") as served:
        served.walk(served.opened(name="arm"), 10)
        slow = Slow(monkeypatch)
        first = served.opened(name="arm", key="one")
        again = served.opened(name="arm", key="one")
        assert again == first
        served.walk(again, 3)
        assert eventually(lambda: slow.begun == 1)
        slow.go_on.set()
    assert stored(tmp_path / "store") == [(9, False)]


def test_a_key_is_for_one_message_and_is_not_remembered_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with inside(most=10) as served:
        served.robots._came._most = 2
        one = served.opened(key="one", seed=1)
        response = served.client.post("/v1/sessions", json={"key": "one", "seed": 2})
        assert "key was sent before with another message" in problem(response, 409)["detail"]
        for key in ("two", "three"):
            assert served.opened(key=key) != one
        assert served.opened(key="one", seed=1) != one, "the oldest was forgotten"
        assert len(served.robots._came) == 2


def test_who_is_busy_again_while_others_are_stored_is_not_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with inside(record=tmp_path / "store", clock=clock, idle=60.0) as served:
        names = {name: served.opened(name=name) for name in ("gone", "ends", "goes-on")}
        for session in names.values():
            served.walk(session, 10)
        slow = Slow(monkeypatch, only="gone")
        clock.now += 59
        served.client.get(f"/v1/sessions/{names['ends']}")
        served.client.get(f"/v1/sessions/{names['goes-on']}")
        clock.now += 1
        served.run(served.robots.sweep)
        assert eventually(lambda: slow.begun == 1)
        assert served.end(names["ends"], 10, 9.0, terminated=True).json()["stored"] == "durable"
        clock.now += 59
        assert served.act(names["goes-on"], 10, 9.0).status_code == 200
        clock.now += 1
        served.run(served.robots.sweep)
        assert served.act(names["goes-on"], 11, 9.0).status_code == 200
        assert served.end(names["ends"], 10, 9.0, terminated=True).status_code == 200
        slow.go_on.set()
        assert served.end(names["goes-on"], 12, 9.0).status_code == 200
    assert sorted(stored(tmp_path / "store")) == [(9, False), (10, True), (12, False)]


def test_who_was_idle_is_let_go_at_once_and_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the first of them takes to be stored."""
    clock = Clock()
    with inside(record=tmp_path / "store", clock=clock, idle=60.0) as served:
        idle = [served.opened(name=name) for name in ("a", "b", "c")]
        for session in idle:
            served.walk(session, 10)
        slow = Slow(monkeypatch, only="a")
        clock.now += 60
        served.run(served.robots.sweep)
        assert eventually(lambda: slow.begun == 1)
        problem(served.end(idle[1], 10, 9.0, terminated=True), 409)
        problem(served.act(idle[2], 10, 9.0), 409)
        slow.go_on.set()
    assert stored(tmp_path / "store") == [(9, False)] * 3


def test_an_end_that_is_being_stored_is_not_swept_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Where it fails, its robot may say it again."""
    clock = Clock()
    with inside(record=tmp_path / "store", clock=clock, idle=60.0) as served:
        session = served.opened(name="arm")
        served.walk(session, 10)
        go_on, begun = threading.Event(), threading.Event()

        def busy(*_: object) -> None:
            begun.set()
            assert go_on.wait(PATIENCE)
            raise StoreBusyError("not now")

        with monkeypatch.context() as patched:
            patched.setattr(EpisodeRecording, "store", busy)
            ended = pool.submit(served.end, session, 10, 9.0, terminated=True)
            assert begun.wait(PATIENCE)
            clock.now += 61
            served.run(served.robots.sweep)
            go_on.set()
            problem(ended.result(PATIENCE), 503)
        assert served.end(session, 10, 9.0, terminated=True).json()["stored"] == "durable"
    assert stored(tmp_path / "store") == [(10, True)]


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_whose_robot_comes_back_meanwhile_is_stored_as_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, fails: bool
) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened(name="arm")
        served.walk(session, 10)
        go_on, begun = threading.Event(), threading.Event()
        store = EpisodeRecording.store

        def later(found: EpisodeRecording, name: str | None, episode: Episode) -> Any:
            begun.set()
            assert go_on.wait(PATIENCE)
            if fails:
                raise StoreBusyError("not now")
            return store(found, name, episode)

        monkeypatch.setattr(EpisodeRecording, "store", later)
        ended = pool.submit(served.end, session, 10, 9.0, terminated=True)
        assert begun.wait(PATIENCE)
        again = served.opened(name="arm")
        go_on.set()
        assert ended.result(PATIENCE).status_code == (503 if fails else 200)
        assert served.act(again, 0).status_code == 200
    assert stored(tmp_path / "store") == [(10, True)]


def test_while_an_end_is_stored_nothing_else_may_be_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened(name="arm")
        served.walk(session, 10)
        slow = Slow(monkeypatch)
        ended = pool.submit(served.end, session, 10, 9.0, terminated=True)
        assert eventually(lambda: slow.begun == 1)
        again = pool.submit(served.end, session, 10, 9.0, terminated=True)
        for response in (
            served.client.delete(f"/v1/sessions/{session}"),
            served.end(session, 10, -5.0, truncated=True),
            served.act(session, 10, 9.0),
        ):
            assert "is being ended" in problem(response, 409)["detail"]
        slow.go_on.set()
        assert ended.result(PATIENCE).json() == again.result(PATIENCE).json()
        counts = served.robots.snapshot()
        assert value(counts, SERVED_EPISODES, "ended") == 1
        assert value(counts, SERVED_EPISODES, "dropped") == 0
    assert stored(tmp_path / "store") == [(10, True)]


# Lines


def test_there_may_be_more_names_than_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a thread; one of which everything is stored makes room."""
    monkeypatch.setattr(recording, "MOST_ROBOTS", 2)
    with inside(record=tmp_path / "store") as served:
        assert served.recording is not None
        for name in ("a", "b", "c", "a", "d"):
            session = served.opened(name=name)
            served.walk(session, 9)
            assert served.end(session, 9, 8.0).json()["stored"] == "durable"
            assert len(served.recording._lines) <= 2
        threads = [each for each in threading.enumerate() if each.name == "outbox"]
        assert len(threads) <= 2
    assert len(stored(tmp_path / "store")) == 5


def test_names_beyond_the_lines_wait_while_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_ROBOTS", 1)
    monkeypatch.setattr(recording, "ACK_SECONDS", 0.05)
    with inside(record=tmp_path / "store") as served:
        with full(monkeypatch):
            one, other = served.opened(name="one"), served.opened(name="other")
            served.walk(one, 9)
            served.walk(other, 9)
            assert served.end(one, 9, 8.0).json()["stored"] == "waiting"
            told = problem(served.end(other, 9, 8.0), 503)
            assert "episodes of 1 robots wait for the disk" in told["detail"]
        found = served.recording
        assert found is not None
        assert eventually(lambda: not any(line._outbox.unacked for line in found._lines.values()))
        monkeypatch.setattr(recording, "ACK_SECONDS", PATIENCE)
        assert served.end(other, 9, 8.0).json()["stored"] == "durable"
    assert len(stored(tmp_path / "store")) == 2


def test_metrics_do_not_wait_for_whoever_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Thirty-two of a line may wait; the next one waits for room, and nobody behind it does."""
    monkeypatch.setattr(recording, "ACK_SECONDS", 0.0)
    monkeypatch.setattr(recording, "PUT_SECONDS", PATIENCE)
    found = EpisodeRecording(tmp_path / "store", weights())
    with full(monkeypatch):
        episode = _episode()
        for _ in range(32):
            assert found.store("arm", episode).outcome == "waiting"
        blocked = pool.submit(found.store, "arm", episode)
        line = found._lines[recording.slot_of("arm")]
        assert eventually(line._own.locked)
        assert found.snapshot()
        assert found.store("leg", episode).outcome == "waiting"
        assert not blocked.done()
    assert blocked.result(PATIENCE).outcome in ("waiting", "durable")
    assert found.close() == 0
    assert len(stored(tmp_path / "store")) == 34


def test_what_the_store_refuses_is_told_to_whoever_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = EpisodeRecording(tmp_path / "store", weights())

    def no(key: AppendKey, payload: bytes) -> Ack:
        return Ack(status=AckStatus.REJECTED, expected=0, durability="fsync", reason="too odd")

    monkeypatch.setattr(found._appender, "append", no)
    told = found.store("arm", _episode())
    assert (told.outcome, told.reason) == ("rejected", "too odd")
    found.keep("arm", _episode())
    line = found._lines[recording.slot_of("arm")]
    assert eventually(lambda: not line._outbox.unacked)
    assert found.close() == 1, "of the other nobody was told"


# The end


def test_what_is_lost_when_nobody_asks_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind one: a store that is busy, a disk that fails, an episode that does not fit."""
    with inside(record=tmp_path / "store", most=9) as served:
        found = served.recording
        assert found is not None
        errors = iter([StoreBusyError("busy"), OSError("no disk")])

        def broken(*_: object) -> Any:
            raise next(errors)

        for name in ("a", "b", "c"):
            served.walk(served.opened(name=name), 10)
        with monkeypatch.context() as patched:
            patched.setattr(EpisodeRecording, "_put", broken)
            for name in ("a", "b"):
                served.opened(name=name)
            assert eventually(lambda: found._lost == 2)
        odd = next(each for each in served.robots.sessions if each.terms.name == "c")
        assert odd._tape is not None
        odd._tape.rewards[0] = float("nan")
        served.opened(name="c")
        assert eventually(lambda: found._lost == 3)
        served.run(served.robots.close)
        assert found.close() == 3
        served.recording = None
    assert stored(tmp_path / "store") == []


def test_a_stop_with_a_full_disk_waits_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Robots wait for the disk side by side: with one after another, six would need six turns."""
    monkeypatch.setattr(recording, "FLUSH_SECONDS", 0.5)
    turn = threading.Barrier(6)
    keep = EpisodeRecording.keep

    def together(found: EpisodeRecording, name: str | None, *rest: Any) -> None:
        turn.wait(PATIENCE)
        keep(found, name, *rest)

    monkeypatch.setattr(EpisodeRecording, "keep", together)
    with full(monkeypatch), inside(record=tmp_path / "store", most=6) as served:
        for name in "abcdef":
            served.walk(served.opened(name=name), 10)
        served.run(served.robots.close)
        assert served.recording is not None
        flushes = threading.Barrier(6)
        close = recording._Line.close

        def flushed(line: Any, seconds: float) -> int:
            flushes.wait(PATIENCE)
            return close(line, seconds)

        monkeypatch.setattr(recording._Line, "close", flushed)
        assert served.recording.close() == 6
        served.recording = None


def test_at_the_end_nobody_waits_longer_than_all_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_service, "CLOSE_SECONDS", 0.0)
    given: list[float] = []
    monkeypatch.setattr(
        EpisodeRecording, "keep", lambda self, name, episode, left: given.append(left)
    )
    with inside(record=tmp_path / "store") as served:
        for name in "ab":
            served.walk(served.opened(name=name), 10)
        served.run(served.robots.close)
    assert given == [0.0, 0.0]


def test_a_broken_store_is_told_and_not_waited_for(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened(name="arm")
        served.walk(session, 10)
        assert served.recording is not None
        served.recording._appender.writer._break(OSError(5, "Input/output error"))
        told = problem(served.end(session, 10, 9.0), 503)
        assert "cannot be written any more" in told["detail"]
        ready = served.client.get("/readyz")
        assert ready.status_code == 503 and "store" in ready.text
        assert str(tmp_path) not in ready.text
        assert served.act(session, 10, 9.0).status_code == 200, "robots are still led"
        served.run(served.robots.close)
        assert served.recording.close() == 1
        served.recording = None


def test_a_store_that_breaks_while_it_is_waited_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "ACK_SECONDS", 0.05)
    found = EpisodeRecording(tmp_path / "store", weights())

    def broken(*_: object) -> None:
        raise found._appender.writer._break(OSError(5, "Input/output error"))

    monkeypatch.setattr(found._appender.writer, "commit", broken)
    with pytest.raises(OSError, match="cannot be written any more"):
        found.store("arm", _episode())
    assert found.broken
    assert found.close() == 1


def _episode() -> Episode:
    sizes = Sizes(window=8, horizon=4, states=STATES, actions=ACTIONS)
    found = Session(SessionConfig(step_limit=40, deadline=1.0), sizes, keep=True)
    for step in range(9):
        found.observe(step, np.full(STATES, step, np.float32), 1.0 if step else None)
        found.answered(answer(step))
    episode = found.abandoned()
    assert episode is not None
    return episode
