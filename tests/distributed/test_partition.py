"""The host of the rollout actors is cut off from the others and reconnected."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.store.store import Store
from tests.support.runs.fleet_runs import FLEET, PARTS
from tests.support.runs.online_job import PATIENCE as RUN_PATIENCE
from tests.support.runs.small_online import new_run
from tests.support.servers.two_hosts import TwoHosts, head_job, missing, two_hosts
from tests.support.servers.waiting import eventually

ACTORS = ("actor-0", "actor-1")
RAYLET = "raylet"
PATIENCE = 2 * RUN_PATIENCE  # seconds: a raylet whose agents start late gives up and restarts
SHORT, LONG = 5.0, 60.0  # seconds; Ray declares a silent node dead in between


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if reason := missing():
        pytest.skip(reason)
    with two_hosts() as hosts:
        yield hosts


def incarnations(run: Path) -> set[tuple[int, int]]:
    return {(key.slot, key.incarnation) for key in Store(run / "replay").keys}


def fenced(hosts: TwoHosts) -> int:
    """How often an actor learned from the coordinator or the store that another has its slot."""
    return hosts.logged("slot-lost") + hosts.logged("outbox-fenced")


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_short_cut_is_waited_for_and_after_a_long_one_the_host_joins_again(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET | {"fleet__roles": True})
    hosts.start("head", cpus=2, roles=("learner", "planner"))
    hosts.start("worker", cpus=2, roles=("actor",))
    with head_job(run, hosts) as work, hosts.watch() as nodes:
        work.until_up(2)
        work.advance(60)
        with hosts.cut():
            time.sleep(SHORT)
        work.advance(100)
        assert [work.restarts(name) for name in ACTORS] == [0, 0]
        nodes.count()
        assert nodes.dead == 0
        known = incarnations(run)
        with hosts.cut():
            time.sleep(LONG)
            assert nodes.count() == 1, "it was declared dead"
            steps = work.steps
        work.until(lambda: all(work.restarts(name) for name in ACTORS))
        work.until(lambda: {slot for slot, _ in incarnations(run) - known} == {0, 1})
        updates = work.status["updates"]
        work.until(lambda: work.steps > steps + 100 and work.status["updates"] > updates)
        assert [work.restarts(name) for name in PARTS[1:]] == [0] * 4
        assert nodes.until(2, PATIENCE), hosts.printed("worker")
        assert work.stop().acknowledged > 10


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_actors_that_were_cut_off_and_replaced_can_no_longer_store(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    """The head has room for all actors. Ray starts a successor of the actor that was cut off; the
    stopped raylet cannot end the old process, which lives on."""
    run = tmp_path / "run"
    new_run(run, **FLEET | {"fleet__roles": True})
    hosts.start("head", cpus=4, roles=("learner", "planner", "actor"))
    hosts.start("worker", cpus=2, roles=("actor",))
    with head_job(run, hosts) as work, hosts.watch() as nodes:
        work.until_up(2)
        node_of = {name: work.processes[name]["node"] for name in (*ACTORS, "learner")}
        away = [name for name in ACTORS if node_of[name] != node_of["learner"]]
        assert len(away) == 1, "they are spread"
        slot = int(away[0].partition("-")[2])
        work.advance(60)
        with hosts.stopped("worker", RAYLET):
            known = incarnations(run)
            with hosts.cut():
                work.until(lambda: work.restarts(away[0]))
                work.until(lambda: any(other == slot for other, _ in incarnations(run) - known))
                assert nodes.count() == 1, "it was declared dead"
                assert not fenced(hosts)
            assert eventually(lambda: fenced(hosts), PATIENCE)
        assert nodes.until(2, PATIENCE), hosts.printed("worker")
        work.advance(100)
        assert [work.restarts(name) for name in PARTS[1:]] == [0] * 4
        assert work.stop().acknowledged > 10
