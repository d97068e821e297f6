"""A run on Ray: all of its processes together, as its users see them."""

import json
import signal
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import ray

from m3pc.distributed.endpoints import RunEndpoints
from m3pc.distributed.launch import check_machines
from m3pc.online.delivery_audit import audit_deliveries
from m3pc.tracking.run_lock import locked
from m3pc.tracking.run_log import read_metrics
from m3pc.types import InputError, Version
from replay.store.store import Store
from tests.support.runs.fleet_runs import FLEET, PARTS, command, finish, m3pc, owed, updates
from tests.support.runs.online_job import alive, job
from tests.support.runs.small_online import new_run
from tests.support.servers.redis_server import RedisServer, free_port
from tests.support.servers.waiting import eventually


@pytest.fixture(params=["file", pytest.param("redis", marks=pytest.mark.long)])
def coordinator(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of the run, by its environment variable."""
    if request.param == "file":
        return {}
    return {"M3PC_COORDINATOR": request.getfixturevalue("redis_server").url}


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_run_lives_through_the_death_of_each_of_its_processes(
    coordinator: dict[str, str], tmp_path: Path
) -> None:
    """In the end also of its driver, with which all others end."""
    run = tmp_path / "run"
    new_run(run, **FLEET)
    with job(run, **coordinator) as work:
        work.until_up(2)
        for name in PARTS:
            pid = work.kill(name)
            work.until_replaced(name, pid)
            work.advance(20)
        done = work.status["updates"]
        work.until(lambda: work.status["updates"] > done)
        assert [work.restarts(name) for name in PARTS] == [1] * len(PARTS)
        pids = [work.pid(name) or 0 for name in (*PARTS, "actor-1")]
        assert all(pids)
        work.signal(signal.SIGKILL)
        assert work.wait() == -signal.SIGKILL
        assert eventually(lambda: not any(map(alive, pids)), 60.0), "they end with the driver"
    delivered = audit_deliveries(run)
    assert delivered.sound, delivered
    assert delivered.stored >= delivered.acknowledged > 10
    epochs = {Version.unpacked(e.version).epoch for e in Store(run / "replay").episodes()}
    assert len(epochs - {0}) == 2  # the learner that was killed, and the one after it
    finish(run, 60, **coordinator)
    assert updates(run) == owed(run)
    assert audit_deliveries(run).sound
    store = Store(run / "replay")
    numbers = [Version.unpacked(episode.version).number for episode in store.episodes()]
    assert max(numbers) > 0, "learnt weights collect"
    last = read_metrics(run, "evaluation")[-1]
    assert (last["step"], last["updates"]) == (int(store.lengths.sum()), updates(run))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_redis_that_is_gone_for_ten_seconds_changes_nothing_but_a_metric(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET)
    server = RedisServer(tmp_path)
    try:
        with job(run, M3PC_COORDINATOR=server.url) as work:
            work.until_up(2)
            server.kill()  # it keeps nothing on disk: all data is lost
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
    assert read_metrics(run, "fleet")[-1]["m3pc_coordinator_failures_total"] > 0
    epochs = {Version.unpacked(e.version).epoch for e in Store(run / "replay").episodes()}
    assert len(epochs - {0}) == 1


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_fleet_is_scaled_and_stopped_from_another_shell(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET)
    with job(run) as work:
        work.until_up(2)
        for count in (6, 1):
            assert f"actors running: {count}, wanted: {count}" in command("scale", run, count)
            work.advance(30)
        status = json.loads(command("status", run, "--json"))
        assert (status["driven"], status["running"], status["wanted"]) == (True, 1, 1)
        slots = {key.slot for key in Store(run / "replay").keys}
        assert slots == set(range(6))
        work.signal(signal.SIGKILL)
        assert work.wait() == -signal.SIGKILL
    assert not json.loads(command("status", run, "--json"))["driven"]
    with job(run) as work:
        work.until_up(1)  # what was wanted last
        assert "between 2 and 3" in command("scale", run, "--between", "2:3")
        work.until(lambda: work.status.get("running") == 2)  # autoscaling enters its bounds
        assert "stopped after" in command("stop", run)
        assert work.wait() == 0, work.output
    delivered = audit_deliveries(run)
    assert delivered.sound, delivered
    assert delivered.acknowledged > 10


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_loop_closes(tmp_path: Path) -> None:
    """The learner learns from what is collected, and what it learns collects."""
    run = tmp_path / "run"
    started = new_run(run, **FLEET | {"online__steps": 1500, "online__pause_after": 100})
    with job(run) as work:
        assert work.wait() == 0, work.output
    store = Store(run / "replay")
    numbers = [Version.unpacked(e.version).number for e in store.episodes()]
    lasts = [Version.unpacked(e.last_version).number for e in store.episodes()]
    assert numbers[0] == 0 and max(lasts) > 60
    thirds = [np.mean(third) for third in np.array_split(numbers, 3)]
    assert all(earlier < later for earlier, later in pairwise(thirds))
    assert updates(run) == owed(run) == int(store.lengths.sum()) // 10
    fleet = read_metrics(run, "fleet")[-1]
    assert fleet["m3pc_actor_policy_staleness_updates/p100"] <= started.config.online.pause_after
    rows = read_metrics(run, "evaluation")
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


@pytest.mark.long
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
        assert eventually(lambda: not alive(pid), 60.0), "an actor that cannot drain is killed"
        work.advance(30)
        work.stop()
    incarnations = {(key.slot, key.incarnation) for key in Store(run / "replay").keys}
    assert all(sum(slot == n for slot, _ in incarnations) >= 2 for n in (0, 1))


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


@pytest.mark.long
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
    incarnations = {(key.slot, key.incarnation) for key in Store(run / "replay").keys}
    assert len(incarnations) >= 3


def duplicates(run: Path) -> float:
    """Episodes that were sent again because the reply was lost."""
    rows = read_metrics(run, "fleet")
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


@pytest.mark.long
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
    new_run(tmp_path / "run")
    with locked(tmp_path / "run"):
        for words in (("scale", tmp_path / "run", 3), ("stop", tmp_path / "run")):
            done = m3pc(*words)
            assert (done.returncode, done.stdout) == (2, "")
            assert "runs in one process (--local)" in done.stderr
        assert "runs in one process (--local)" in command("status", tmp_path / "run")
    assert not (tmp_path / "run" / "wanted.json").exists()


def test_options_that_lock_step_ignores_are_refused(tmp_path: Path) -> None:
    new_run(tmp_path / "run")
    for words in (
        ("finetune", "nowhere", "--data", "nothing", "--local", "--actors", 2),
        ("finetune", "nowhere", "--data", "nothing", "--local", "--address", "auto"),
        ("resume", tmp_path / "run", "--local", "--address", "auto"),
    ):
        done = m3pc(*words)
        assert done.returncode == 2
        assert "--local is one process" in done.stderr


def test_what_would_fail_in_every_process_is_reported_once(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    absent = f"redis://127.0.0.1:{free_port()}"
    done = m3pc("resume", run.path, "--coordinator", absent)
    assert done.returncode == 2
    assert "no coordinator answers" in done.stderr
    info = run.path / "run.json"
    info.write_text(info.read_text().replace(run.info.checksum, "0" * 64))
    done = m3pc("resume", run.path)
    assert done.returncode == 2
    assert "give the same data" in done.stderr


def test_a_coordinator_in_a_file_serves_one_machine(
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
    rows = read_metrics(run, "fleet")
    assert rows[-1]["m3pc_run_scaled_total/up"] == 1
