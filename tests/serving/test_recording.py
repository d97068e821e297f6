"""Episodes of robots in a store: each once, however it ended."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.core.returns import ReturnRule
from m3pc.serving.recording import ANONYMOUS, EpisodeRecording, RecordingLimits, slot_of
from m3pc.types import Episode, InputError
from replay.sampling.sampler import Sampler
from replay.store.inspect import inspect_store
from replay.store.store import Store
from tests.support.faults.faulty_disk import FaultyDisk, recording_on
from tests.support.servers.served import Clock, InProcessServer, in_process, problem, weights
from tests.support.servers.waiting import PATIENCE


def stored(path: Path) -> list[Episode]:
    """What a reader finds."""
    return list(Store(path).episodes())


def run_episode(
    served: InProcessServer, steps: int, *, name: str = "arm", **how: Any
) -> dict[str, Any]:
    session = served.opened(name=name, seed=3)
    served.walk(session, steps)
    how = how or {"terminated": True}
    response: dict[str, Any] = served.end(session, steps, steps - 1.0, **how).json()
    return response


def test_an_ended_episode_is_in_the_store(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        session = served.opened(name="arm", seed=3)
        answers = served.walk(session, 10)
        response = served.end(session, 10, 9.0, terminated=True).json()
        assert response == {
            "steps": 10, "total": sum(range(10)), "stored": "durable", "slot": slot_of("arm"),
            "reason": "",
        }  # fmt: skip
    (episode,) = stored(tmp_path / "store")
    assert episode.states.tolist() == [*([k, k + 0.5, -k] for k in range(10)), [9, 9, 9]]
    np.testing.assert_allclose(episode.actions, [answer["action"] for answer in answers], atol=1e-6)
    assert episode.rewards.tolist() == list(range(10))
    assert (episode.terminated, episode.truncated, episode.seed) == (True, False, 3)
    assert (episode.version, episode.last_version) == (7, 7)
    assert episode.target_return == pytest.approx(answers[0]["condition"])


def test_a_repeated_end_stores_nothing_twice(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        session = served.opened()
        served.walk(session, 9)
        ends = [served.end(session, 9, 8.0, truncated=True).json() for _ in range(3)]
        assert ends[0]["stored"] == "durable" and ends[0] == ends[1] == ends[2]
    assert [episode.truncated for episode in stored(tmp_path / "store")] == [True]


def test_repeated_steps_are_stored_once(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        session = served.opened()
        for step in range(9):
            for _ in range(2):
                assert served.act(session, step, step - 1.0 if step else None).status_code == 200
        served.end(session, 9, 8.0, terminated=True)
    assert [len(episode) for episode in stored(tmp_path / "store")] == [9]


def test_the_episode_of_an_idle_robot_is_stored_as_cut_short(tmp_path: Path) -> None:
    """With eight steps whose outcome is known it is stored, with seven it is not."""
    clock = Clock()
    with in_process(record=tmp_path / "store", clock=clock, idle_seconds=60.0) as served:
        served.walk(served.opened(), 9)
        served.walk(served.opened(), 8)
        clock.now += 60
        served.run(served.service.abandon_idle)
        assert len(served.service.sessions) == 0
        counted = served.client.get("/metrics").text
    (episode,) = stored(tmp_path / "store")
    assert (len(episode), episode.terminated, episode.truncated) == (8, False, False)
    assert 'm3pc_serve_episodes_total{outcome="abandoned"} 1.0' in counted
    assert 'm3pc_serve_episodes_total{outcome="dropped"} 1.0' in counted


def test_a_replaced_session_is_stored_as_cut_short(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        served.walk(served.opened(name="arm"), 10)
        run_episode(served, 9)
    first, second = stored(tmp_path / "store")
    assert (len(first), first.terminated) == (9, False)
    assert (len(second), second.terminated) == (9, True)


def test_a_stopping_server_stores_open_episodes(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        served.walk(served.opened(), 12)
        served.run(served.service.close)
    assert [len(episode) for episode in stored(tmp_path / "store")] == [11]


def test_a_dropped_session_is_not_stored(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        session = served.opened()
        served.walk(session, 12)
        served.client.delete(f"/v1/sessions/{session}")
        empty = served.opened()
        assert served.end(empty, 0).json()["stored"] == "no step"
    assert stored(tmp_path / "store") == []


def test_each_robot_keeps_its_slot_across_servers(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for _ in range(2):
        with in_process(record=path) as served:
            run_episode(served, 9, name="arm")
            run_episode(served, 9, name="arm")
            run_episode(served, 9, name="leg")
            session = served.opened()
            served.walk(session, 9)
            assert served.end(session, 9, 8.0).json()["slot"] == ANONYMOUS
    producers = inspect_store(path).producers
    assert {slot: (each.incarnation, each.expected) for slot, each in producers.items()} == {
        slot_of("arm"): (1, 2),
        slot_of("leg"): (1, 1),
        ANONYMOUS: (1, 1),
    }
    assert len(stored(path)) == 8


def test_a_recording_server_requires_a_reward_at_every_step(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        session = served.opened()
        served.act(session, 0)
        assert "reward is missing" in problem(served.act(session, 1), 409)["detail"]
        assert served.act(session, 1, 0.5).status_code == 200


def test_a_learner_can_sample_episodes_of_robots(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        for steps in (9, 12):
            run_episode(served, steps)
    store = Store(tmp_path / "store")
    assert (store.header.env, store.header.max_episode_steps) == ("Pendulum-v1", 40)
    batch = Sampler(
        store, length=8, batch=32, seed=0, returns=ReturnRule(max_episode_steps=40)
    ).batch(0)
    assert batch.states.shape == (32, 8, 3)
    assert (np.diff(batch.states[..., 0], axis=1) == 1).all(), "windows are consecutive steps"


def test_the_store_can_be_read_while_it_grows(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        for count in (1, 2):
            run_episode(served, 9)
            assert len(stored(tmp_path / "store")) == count


def test_the_executed_action_is_stored(tmp_path: Path) -> None:
    with in_process(record=tmp_path / "store") as served:
        session = served.opened()
        planned = served.act(session, 0).json()["action"]
        for step in range(1, 9):
            response = served.act(session, step, 0.0, **({"action": [0.25]} if step > 1 else {}))
            assert response.status_code == 200
        assert served.end(session, 9, 0.0, action=[-0.5]).json()["stored"] == "durable"
    (episode,) = stored(tmp_path / "store")
    np.testing.assert_allclose(episode.actions[:, 0], [*planned, *[0.25] * 7, -0.5], atol=1e-6)


def test_a_full_disk_only_delays_an_episode(tmp_path: Path) -> None:
    """The answer says that the episode waits, and it is stored once there is room."""
    disk = FaultyDisk()
    with in_process(record=tmp_path / "store", open_recording=recording_on(disk)) as served:
        assert served.recording is not None
        disk.full = True
        served.recording.limits = RecordingLimits(ack_seconds=0.2)
        assert run_episode(served, 9)["stored"] == "waiting"
        disk.full = False
        served.recording.limits = RecordingLimits(ack_seconds=PATIENCE)
        assert run_episode(served, 10)["stored"] == "durable"
    assert [len(episode) for episode in stored(tmp_path / "store")] == [9, 10], "in order"


def test_an_end_that_could_not_be_stored_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process(record=tmp_path / "store") as served:
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
    writing = EpisodeRecording(tmp_path / "store", weights())
    try:
        with pytest.raises(InputError, match="being written by another process"):
            EpisodeRecording(tmp_path / "store", weights())
    finally:
        writing.close()
