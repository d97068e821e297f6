"""Episodes of robots in a store: each once, in whatever way it ended."""

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.core.returns import ReturnRule
from m3pc.serving import recording
from m3pc.serving.recording import ANONYMOUS, EpisodeRecording, slot_of
from m3pc.types import Episode, InputError
from replay.sampling.sampler import Sampler
from replay.store.inspect import survey
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.servers.served import Clock, Inside, inside, problem, weights
from tests.support.servers.waiting import PATIENCE


def stored(path: Path) -> list[Episode]:
    """What a reader finds."""
    return list(Store(path).episodes())


def ended(served: Inside, steps: int, *, name: str = "arm", **how: Any) -> dict[str, Any]:
    session = served.opened(name=name, seed=3)
    served.walk(session, steps)
    how = how or {"terminated": True}
    found: dict[str, Any] = served.end(session, steps, steps - 1.0, **how).json()
    return found


def test_an_episode_that_ended_is_in_the_store(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened(name="arm", seed=3)
        told = served.walk(session, 10)
        found = served.end(session, 10, 9.0, terminated=True).json()
        assert found == {
            "steps": 10, "total": sum(range(10)), "stored": "durable", "slot": slot_of("arm"),
            "reason": "",
        }  # fmt: skip
    (episode,) = stored(tmp_path / "store")
    assert episode.states.tolist() == [*([k, k + 0.5, -k] for k in range(10)), [9, 9, 9]]
    np.testing.assert_allclose(episode.actions, [each["action"] for each in told], atol=1e-6)
    assert episode.rewards.tolist() == list(range(10))
    assert (episode.terminated, episode.truncated, episode.seed) == (True, False, 3)
    assert (episode.version, episode.last_version) == (7, 7)
    assert episode.target_return == pytest.approx(told[0]["condition"])


def test_an_end_that_is_repeated_stores_nothing_twice(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened()
        served.walk(session, 9)
        ends = [served.end(session, 9, 8.0, truncated=True).json() for _ in range(3)]
        assert ends[0]["stored"] == "durable" and ends[0] == ends[1] == ends[2]
    assert [each.truncated for each in stored(tmp_path / "store")] == [True]


def test_steps_that_are_repeated_are_stored_once(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened()
        for step in range(9):
            for _ in range(2):
                assert served.act(session, step, step - 1.0 if step else None).status_code == 200
        served.end(session, 9, 8.0, terminated=True)
    assert [len(each) for each in stored(tmp_path / "store")] == [9]


def test_a_robot_that_left_is_stored_as_cut_short(tmp_path: Path) -> None:
    """Eight steps whose outcome is known are worth it, seven are not."""
    clock = Clock()
    with inside(record=tmp_path / "store", clock=clock, idle=60.0) as served:
        served.walk(served.opened(), 9)
        served.walk(served.opened(), 8)
        clock.now += 60
        served.run(served.robots.sweep)
        assert len(served.robots.sessions) == 0
        counted = served.client.get("/metrics").text
    (episode,) = stored(tmp_path / "store")
    assert (len(episode), episode.terminated, episode.truncated) == (8, False, False)
    assert 'm3pc_serve_episodes_total{outcome="abandoned"} 1.0' in counted
    assert 'm3pc_serve_episodes_total{outcome="dropped"} 1.0' in counted


def test_a_robot_that_comes_back_leaves_a_cut_episode_behind(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        served.walk(served.opened(name="arm"), 10)
        ended(served, 9)
    first, second = stored(tmp_path / "store")
    assert (len(first), first.terminated) == (9, False)
    assert (len(second), second.terminated) == (9, True)


def test_a_server_that_stops_stores_what_is_known(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        served.walk(served.opened(), 12)
        served.run(served.robots.close)
    assert [len(each) for each in stored(tmp_path / "store")] == [11]


def test_who_leaves_on_purpose_is_not_stored(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened()
        served.walk(session, 12)
        served.client.delete(f"/v1/sessions/{session}")
        empty = served.opened()
        assert served.end(empty, 0).json()["stored"] == "no step"
    assert stored(tmp_path / "store") == []


def test_robots_have_slots_of_their_own_on_every_day(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for _ in range(2):
        with inside(record=path) as served:
            ended(served, 9, name="arm")
            ended(served, 9, name="arm")
            ended(served, 9, name="leg")
            session = served.opened()
            served.walk(session, 9)
            assert served.end(session, 9, 8.0).json()["slot"] == ANONYMOUS
    found = survey(path).producers
    assert {slot: (each.incarnation, each.expected) for slot, each in found.items()} == {
        slot_of("arm"): (1, 2),
        slot_of("leg"): (1, 1),
        ANONYMOUS: (1, 1),
    }
    assert len(stored(path)) == 8


def test_where_episodes_are_stored_every_step_needs_a_reward(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened()
        served.act(session, 0)
        assert "reward is missing" in problem(served.act(session, 1), 409)["detail"]
        assert served.act(session, 1, 0.5).status_code == 200


def test_a_learner_can_sample_what_robots_did(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        for steps in (9, 12):
            ended(served, steps)
    store = Store(tmp_path / "store")
    assert (store.header.env, store.header.max_episode_steps) == ("Pendulum-v1", 40)
    batch = Sampler(
        store, length=8, batch=32, seed=0, returns=ReturnRule(max_episode_steps=40)
    ).batch(0)
    assert batch.states.shape == (32, 8, 3)
    assert (np.diff(batch.states[..., 0], axis=1) == 1).all(), "pieces are steps in a row"


def test_what_robots_did_is_read_while_the_store_grows(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        for count in (1, 2):
            ended(served, 9)
            assert len(stored(tmp_path / "store")) == count


def test_what_was_really_done_is_stored(tmp_path: Path) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened()
        planned = served.act(session, 0).json()["action"]
        for step in range(1, 9):
            response = served.act(session, step, 0.0, **({"action": [0.25]} if step > 1 else {}))
            assert response.status_code == 200
        assert served.end(session, 9, 0.0, action=[-0.5]).json()["stored"] == "durable"
    (episode,) = stored(tmp_path / "store")
    np.testing.assert_allclose(episode.actions[:, 0], [*planned, *[0.25] * 7, -0.5], atol=1e-6)


def test_a_disk_that_is_full_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The robot is told that its episode waits, and it is stored once there is room."""
    monkeypatch.setattr(recording, "ACK_SECONDS", 0.2)
    full = threading.Event()
    full.set()
    room = Writer._make_room
    monkeypatch.setattr(Writer, "_make_room", lambda self: not full.is_set() and room(self))
    with inside(record=tmp_path / "store") as served:
        assert ended(served, 9)["stored"] == "waiting"
        full.clear()
        monkeypatch.setattr(recording, "ACK_SECONDS", PATIENCE)
        assert ended(served, 10)["stored"] == "durable"
    assert [len(each) for each in stored(tmp_path / "store")] == [9, 10], "in order"


def test_what_cannot_be_taken_now_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(record=tmp_path / "store") as served:
        session = served.opened()
        served.walk(session, 9)
        with monkeypatch.context() as patched:

            def broken(self: EpisodeRecording, name: str | None, episode: Episode) -> None:
                raise OSError(errno.EIO, "no disk")

            patched.setattr(EpisodeRecording, "store", broken)
            response = served.end(session, 9, 8.0)
        assert "no disk" in problem(response, 503)["detail"]
        assert served.end(session, 9, 8.0).json()["stored"] == "durable"
    assert len(stored(tmp_path / "store")) == 1


def test_a_store_of_something_else_is_refused(tmp_path: Path) -> None:
    EpisodeRecording(tmp_path / "store", weights()).close()
    with pytest.raises(InputError, match="was made for"):
        EpisodeRecording(tmp_path / "store", weights(8, states=5))


def test_a_store_that_is_being_written_is_refused(tmp_path: Path) -> None:
    one = EpisodeRecording(tmp_path / "store", weights())
    try:
        with pytest.raises(InputError, match="being written by another process"):
            EpisodeRecording(tmp_path / "store", weights())
    finally:
        one.close()
