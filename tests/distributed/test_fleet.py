"""A run on Ray: all of its processes together, as its users see them."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from m3pc.distributed.driver import check_machines
from m3pc.distributed.endpoints import RunEndpoints
from m3pc.model import checkpoint
from m3pc.online.delivery_audit import audit
from m3pc.online.run_folder import open_run
from m3pc.tracking.run_log import read
from m3pc.types import InputError, Version
from replay.server.schedule import schedule_of
from replay.store.store import Store
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.online_job import alive, job
from tests.support.runs.small_online import new_run
from tests.support.servers.redis_server import RedisServer, free_port
from tests.support.servers.waiting import eventually

FLEET: dict[str, Any] = {
    "online__steps": 10**6,
    "online__publish_every": 5,
    "online__checkpoint_every": 20,
    "evaluation__every": 300,
    "fleet__actors": 2,
    "fleet__receipts": True,
}
PARTS = ("actor-0", "planner-0", "store", "learner", "evaluator")


def m3pc(*words: object) -> "subprocess.CompletedProcess[str]":
    """The command, from another shell."""
    return subprocess.run(
        [sys.executable, "-m", "m3pc", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def command(*words: object) -> str:
    done = m3pc(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def owed(run: Path) -> int:
    """Updates, by what the store holds."""
    store, opened = Store(run / "replay"), open_run(run)
    schedule = schedule_of(opened.config.online, opened.facts.max_episode_steps)
    return schedule.owed(int(store.lengths.sum()), len(store.lengths))


def updates(run: Path) -> int:
    return int(checkpoint.newest(run / "checkpoints").progress["updates"])


def finish(run: Path, steps: int, **environment: str) -> None:
    """Go on, on a new cluster, to the end of a run that is `steps` longer than now."""
    path = run / "config.yaml"
    total = int(Store(run / "replay").lengths.sum()) + steps
    path.write_text(path.read_text().replace("steps: 1000000", f"steps: {total}"))
    with job(run, **environment) as work:
        assert work.wait() == 0, work.output
        assert "finished" in work.output


@pytest.fixture(params=["file", pytest.param("redis", marks=pytest.mark.long)])
def coordinator(request: pytest.FixtureRequest) -> dict[str, str]:
    """Where the processes meet."""
    if request.param == "file":
        return {}
    return {"M3PC_COORDINATOR": request.getfixturevalue("redis_server").url}


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_run_lives_through_the_death_of_each_of_its_processes(
    coordinator: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET)
    with job(run, **coordinator) as work:
        work.until_up(2)
        for name in PARTS:
            pid = work.kill(name)
            work.until_replaced(name, pid)
            work.advance(60)
        done = work.status["updates"]
        work.until(lambda: work.status["updates"] > done)
        assert [work.restarts(name) for name in PARTS] == [1] * len(PARTS)
        found = work.stop()
    assert found.stored >= found.acknowledged > 20
    assert updates(run) <= owed(run)
    epochs = {Version.unpacked(version).epoch for version in Store(run / "replay").versions}
    assert len(epochs - {0}) == 2  # the learner that was killed, and the one after it
    finish(run, 100, **coordinator)
    assert updates(run) == owed(run)
    assert audit(run).sound


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_redis_that_is_gone_for_ten_seconds_changes_nothing_but_a_metric(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET)
    server = RedisServer(tmp_path)
    try:
        with job(run, M3PC_COORDINATOR=server.url) as work:
            work.until_up(2)
            server.kill()  # it keeps nothing on disk: all that it knew is lost
            end = time.monotonic() + 10
            work.advance(60)
            work.until(lambda: time.monotonic() > end)
            server.start()
            work.advance(60)
            version = work.status["version"]
            work.until(lambda: work.status["version"] > version)  # new ones reach the planner again
            assert [work.restarts(name) for name in (*PARTS, "actor-1")] == [0] * 6
            work.stop()
    finally:
        server.kill()
    assert read(run, "fleet")[-1]["m3pc_coordinator_failures_total"] > 0
    epochs = {Version.unpacked(version).epoch for version in Store(run / "replay").versions}
    assert len(epochs - {0}) == 1


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_fleet_is_scaled_from_another_shell_and_a_run_outlives_its_driver(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET)
    with job(run) as work:
        work.until_up(2)
        for count in (6, 1):
            assert f"actors running: {count}, wanted: {count}" in command("scale", run, count)
            work.advance(30)
        assert work.status["wanted"] == 1
        assert json.loads(command("status", run, "--json"))["running"] == 1
        slots = {key.slot for key in Store(run / "replay").keys}
        assert slots == set(range(6))
        others = [pid for name in (*PARTS[1:], "actor-0") if (pid := work.pid(name)) is not None]
        assert len(others) == len(PARTS)
        work.signal(signal.SIGKILL)
        assert work.wait() == -signal.SIGKILL
        assert eventually(lambda: not any(map(alive, others)), 60.0), "they end with the driver"
    assert not json.loads(command("status", run, "--json"))["driven"]
    assert audit(run).sound
    with job(run) as work:
        work.until_up(1)  # what was wanted last
        assert "between 2 and 3" in command("scale", run, "--between", "2:3")
        work.until(lambda: work.status.get("running") == 2)  # autoscaling enters its bounds
        assert "stopped after" in command("stop", run)
        assert work.wait() == 0, work.output
    found = audit(run)
    assert found.sound, found
    assert found.acknowledged > 10


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_loop_closes(tmp_path: Path) -> None:
    """What is collected is learnt from, and what is learnt collects."""
    run = tmp_path / "run"
    opened = new_run(run, **FLEET | {"online__steps": 1500, "online__pause_after": 100})
    with job(run) as work:
        assert work.wait() == 0, work.output
    store = Store(run / "replay")
    numbers = [Version.unpacked(version).number for version in store.versions]
    lasts = [Version.unpacked(version).number for version in store.last_versions]
    assert numbers[0] == 0 and max(lasts) > 60
    thirds = [np.mean(third) for third in np.array_split(numbers, 3)]
    assert all(one < other for one, other in pairwise(thirds))
    assert updates(run) == owed(run) == int(store.lengths.sum()) // 10
    fleet = read(run, "fleet")[-1]
    assert fleet["m3pc_actor_policy_staleness_updates/p100"] <= opened.config.online.pause_after
    rows = read(run, "evaluation")
    parts = [row["step"] // 300 for row in rows[:-1]]  # one that lasts longer than a part skips it
    assert parts[0] == 0 and len(parts) > 1 and parts == sorted(set(parts))
    assert rows[-1]["updates"] == updates(run)
    assert rows[-1]["step"] == int(store.lengths.sum())


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_updates_per_step_are_the_same_with_two_actors_and_with_eight(tmp_path: Path) -> None:
    for actors in (2, 8):
        run = tmp_path / f"run-{actors}"
        changes = {"online__steps": 600, "fleet__actors": actors, "evaluation__every": 10**6}
        new_run(run, **FLEET | changes)
        with job(run) as work:
            assert work.wait() == 0, work.output
        store = Store(run / "replay")
        assert {key.slot for key in store.keys} == set(range(actors))
        assert updates(run) == int(store.lengths.sum()) // 10


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_an_actor_that_is_stopped_or_whose_environment_hangs_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {"fleet__silence": 4.0, "fleet__step_timeout": 3.0, "fleet__deadline": 2.0}
    new_run(run, env="tests.support.envs.point:toy/UnrulyPoint-v0", **FLEET | changes)
    with job(run, M3PC_HARM="hang", M3PC_HARM_AFTER="150") as work:
        work.until_up(2)
        pid = work.kill("actor-1", signal.SIGSTOP)
        work.until_replaced("actor-1", pid)
        assert not alive(pid)
        work.until(lambda: work.restarts("actor-0"))  # its environment hung
        work.advance(100)
        pid = work.kill("actor-1", signal.SIGSTOP)
        command("scale", run, 1)
        assert eventually(lambda: not alive(pid), 60.0), "one that cannot leave is ended"
        work.advance(30)
        work.stop()
    lives = {(key.slot, key.incarnation) for key in Store(run / "replay").keys}
    assert all(sum(slot == mine for slot, _ in lives) >= 2 for mine in (0, 1))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_planner_that_stalls_is_waited_for_and_one_that_hangs_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET | {"fleet__silence": 8.0})
    with job(run) as work:
        work.until_up(2)
        pid = work.kill("planner-0", signal.SIGSTOP)
        end = time.monotonic() + 2
        work.until(lambda: time.monotonic() > end)
        work.kill("planner-0", signal.SIGCONT)
        work.advance(60)
        assert (work.pid("planner-0"), work.restarts("planner-0")) == (pid, 0)
        work.kill("planner-0", signal.SIGSTOP)
        work.until_replaced("planner-0", pid)
        assert not alive(pid)
        work.advance(60)
        assert [work.restarts(name) for name in PARTS] == [0, 1, 0, 0, 0]
        work.stop()


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_an_environment_that_takes_its_process_down_costs_its_episodes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, env="tests.support.envs.point:toy/UnrulyPoint-v0", **FLEET)
    with job(run, M3PC_HARM="crash", M3PC_HARM_AFTER="150") as work:
        work.until(lambda: work.restarts("actor-0") and work.restarts("actor-1"))
        work.advance(60)
        assert work.stop().acknowledged > 0
        assert [work.restarts(name) for name in PARTS[1:]] == [0] * 4
    lives = {(key.slot, key.incarnation) for key in Store(run / "replay").keys}
    assert len(lives) >= 3


def duplicates(run: Path) -> float:
    """Episodes that were sent again because the reply was lost."""
    rows = read(run, "fleet")
    return float(rows[-1].get("m3pc_replay_append_total/duplicate", 0)) if rows else 0.0


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_tenth_of_lost_replies_loses_and_doubles_nothing(tmp_path: Path) -> None:
    failures = {"num_failures": -1, "req_failure_prob": 5, "resp_failure_prob": 10}
    lossy = json.dumps({"CoreWorkerService.grpc_client.PushTask": failures})
    run = tmp_path / "run"
    new_run(run, **FLEET | {"fleet__deadline": 1.0})
    with job(run, RAY_testing_rpc_failure=lossy) as work:
        work.until(lambda: work.steps >= 300 and duplicates(run))
        assert work.stop().acknowledged >= 10


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_run_whose_environments_always_break_ends_with_code_three(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, env="tests.support.envs.point:toy/BrokenPoint-v0", **FLEET)
    with job(run) as work:
        assert work.wait() == 3, work.output
        assert "every actor ended too often" in work.output
    assert len(Store(run / "replay").lengths) == 0


def test_a_run_that_does_not_run_can_neither_be_scaled_nor_stopped(tmp_path: Path) -> None:
    new_run(tmp_path / "run")
    for words in (("scale", tmp_path / "run", 3), ("stop", tmp_path / "run")):
        done = m3pc(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "does not run; start it with m3pc resume" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "give a number of rollout processes, or --between"),
        ([2, "--between", "1:2"], "give a number of rollout processes, or --between"),
        (["--between", "2"], "give two numbers such as 2:8"),
        (["--between", "a:b"], "give two numbers such as 2:8"),
    ],
)
def test_a_number_or_bounds_not_both(tmp_path: Path, words: list[object], expected: str) -> None:
    new_run(tmp_path / "run")
    done = m3pc("scale", tmp_path / "run", *words)
    assert done.returncode == 2
    assert expected in done.stderr


def test_a_run_in_lock_step_is_neither_scaled_nor_stopped_by_a_file(tmp_path: Path) -> None:
    from m3pc.tracking.run_lock import locked

    new_run(tmp_path / "run")
    with locked(tmp_path / "run"):
        for words in (("scale", tmp_path / "run", 3), ("stop", tmp_path / "run")):
            done = m3pc(*words)
            assert (done.returncode, done.stdout) == (2, "")
            assert "runs in one process (--local)" in done.stderr
        assert "runs in one process (--local)" in command("status", tmp_path / "run")
    assert not (tmp_path / "run" / "wanted.json").exists()


def test_words_that_lock_step_would_not_hear_are_refused(tmp_path: Path) -> None:
    new_run(tmp_path / "run")
    for words in (
        ("finetune", "nowhere", "--data", "nothing", "--local", "--actors", 2),
        ("finetune", "nowhere", "--data", "nothing", "--local", "--address", "auto"),
        ("resume", tmp_path / "run", "--local", "--address", "auto"),
    ):
        done = m3pc(*words)
        assert done.returncode == 2
        assert "--local is one process" in done.stderr


def test_what_every_process_would_stumble_over_is_told_at_once(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    nobody = f"redis://127.0.0.1:{free_port()}"
    done = m3pc("resume", run.path, "--coordinator", nobody)
    assert done.returncode == 2
    assert "no coordinator answers" in done.stderr
    facts = run.path / "run.json"
    facts.write_text(facts.read_text().replace(run.facts.checksum, "0" * 64))
    done = m3pc("resume", run.path)
    assert done.returncode == 2
    assert "give the same data" in done.stderr


def test_several_machines_do_not_meet_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [("one", True), ("two", True), ("gone", False)]
    nodes = [{"NodeManagerHostname": host, "Alive": alive} for host, alive in hosts]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    check_machines(RunEndpoints(run=tmp_path, id="x", coordinator="redis://127.0.0.1:1"))
    with pytest.raises(InputError, match=r"2 machines \(one, two\), which cannot meet in a file"):
        check_machines(RunEndpoints(run=tmp_path, id="x", coordinator=""))
    nodes[1]["Alive"] = False
    check_machines(RunEndpoints(run=tmp_path, id="x", coordinator=""))


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    from m3pc.tracking.run_lock import locked

    new_run(tmp_path / "run")
    with locked(tmp_path / "run"):
        done = m3pc("resume", tmp_path / "run")
    assert done.returncode == 2
    assert "is being worked on by another process" in done.stderr


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_learner_that_waits_gets_more_actors_and_no_more_than_allowed(tmp_path: Path) -> None:
    """Environments are slow and few updates are owed: learner and planner mostly wait."""
    run = tmp_path / "run"
    more = {"online__updates_per_step": 0.01, "fleet__actors": 1, "fleet__most_actors": 2}
    new_run(run, env="tests.support.envs.point:toy/SlowPoint-v0", **FLEET | more)
    with job(run) as work:
        work.until_up(1)
        work.until(lambda: work.status.get("running") == 2)
        work.advance(200)
        assert work.status["wanted"] == 2
        work.stop()
    rows = read(run, "fleet")
    assert rows[-1]["m3pc_run_scaled_total/up"] == 1
