"""A run on Ray under many faults, over minutes or at once."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from m3pc.core.exit_codes import TERMINATED
from m3pc.online.delivery_audit import audit_deliveries
from replay.store.store import Store
from tests.support.runs.fleet_runs import FLEET, PARTS, finish, owed, updates
from tests.support.runs.online_job import job
from tests.support.runs.small_online import new_run

SLOTS = tuple(f"actor-{slot}" for slot in range(8))


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_lives_through_forty_deaths(tmp_path: Path) -> None:
    """Three of each actor and four of each other process: a fifth would park it."""
    run = tmp_path / "run"
    new_run(run, **FLEET | {"fleet__actors": len(SLOTS), "fleet__silence": 15.0})
    rng = np.random.default_rng(0)
    deaths = [*SLOTS * 3, *PARTS[1:] * 4]
    rng.shuffle(deaths)
    killed: dict[str, int] = {}
    with job(run) as work:
        work.until_up(len(SLOTS))
        for name in deaths:
            how = signal.SIGSTOP if rng.random() < 0.1 else signal.SIGKILL
            work.until_replaced(name, killed.get(name, 0))
            killed[name] = work.kill(name, how)
            time.sleep(rng.uniform(0, 3))
        work.until_up(len(SLOTS))
        work.until(lambda: all(work.pid(name) is not None for name in PARTS))
        done = work.status["updates"]
        work.until(lambda: work.status["updates"] > done)
        delivered = work.stop()
    assert delivered.acknowledged > len(deaths)
    finish(run, 100)
    assert updates(run) == owed(run)
    assert audit_deliveries(run).sound


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_quarter_of_many_actors_dies_at_once(tmp_path: Path) -> None:
    run, count = tmp_path / "run", 64
    changes = {"fleet__actors": count, "fleet__envs_per_actor": 1, "fleet__silence": 120.0}
    new_run(run, **FLEET | changes)
    with job(run) as work:
        work.until_up(count)
        before = len(Store(run / "replay").keys)
        slots = range(0, count, 4)
        killed = {name: work.kill(name) for name in [f"actor-{slot}" for slot in slots]}
        for name, pid in killed.items():
            work.until_replaced(name, pid)
        work.until_up(count)
        work.until(lambda: {key.slot for key in Store(run / "replay").keys[before:]} >= {*slots})
        ends = [work.restarts(f"actor-{slot}") for slot in range(count)]
        assert ends == [int(slot in slots) for slot in range(count)]
        assert work.stop().acknowledged >= len(slots)


def memory(name: str) -> int:
    """Bytes, from /proc/meminfo."""
    rows = dict(row.split(":") for row in Path("/proc/meminfo").read_text().splitlines())
    return int(rows[name].split()[0]) << 10


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_environment_that_takes_all_memory_costs_no_learner(tmp_path: Path) -> None:
    """Ray kills rollout processes, which it can restart, and of the others the one that started
    last: the evaluator."""
    run = tmp_path / "run"
    new_run(run, env="tests.support.envs.point:toy/GreedyPoint-v0", **FLEET)
    total = memory("MemTotal")
    threshold = (total - memory("MemAvailable") + (5 << 30)) / total
    if threshold > 0.9:
        pytest.skip("less than 5 GB of memory are free")
    settings = {"RAY_memory_usage_threshold": f"{threshold:.3f}"}
    with job(run, M3PC_GREEDY=str(tmp_path / "greedy"), **settings) as work:
        work.until(lambda: work.restarts("actor-0") + work.restarts("actor-1"))
        work.advance(200)
        assert [work.restarts(name) for name in ("planner-0", "store", "learner")] == [0] * 3
        work.stop()


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_that_is_stopped_at_any_time_ends_in_order(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET)
    rng = np.random.default_rng(0)
    for _ in range(10):
        with job(run) as work:
            work.until(lambda: work.status)  # from here on it handles signals
            time.sleep(rng.uniform(0, 8))
            work.stop()
    with job(run) as work:
        work.until_up(2)
        work.signal(signal.SIGTERM)
        time.sleep(0.05)
        work.signal(signal.SIGTERM)  # a second one ends it at once
        assert work.wait() in (0, TERMINATED), work.output
    finish(run, 100)
    assert updates(run) == owed(run)
    assert audit_deliveries(run).sound
