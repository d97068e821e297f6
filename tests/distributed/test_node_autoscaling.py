"""A cluster that grows with the fleet of a run, and shrinks with it."""

from pathlib import Path

import pytest

from tests.support.runs.fleet_runs import FLEET, command
from tests.support.runs.online_job import PATIENCE, job
from tests.support.runs.small_online import new_run
from tests.support.servers.autoscaling_cluster import autoscaling_cluster

# Each actor needs a node of its own: the head offers nothing to them.
HEAD = {"CPU": 2, "m3pc_learner": 1, "m3pc_planner": 1}
WORKER = {"CPU": 1, "m3pc_actor": 1}


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_nodes_come_with_actors_and_go_when_they_idle(version: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET | {"fleet__actors": 1, "fleet__roles": True})
    with autoscaling_cluster(version, head=HEAD, worker=WORKER, max_nodes=4) as (cluster, nodes):
        assert nodes.until(1, PATIENCE)
        with job(run, "--address", cluster.address, **cluster.environment) as work:
            work.until_up(1)
            assert nodes.until(2, PATIENCE), nodes.seen
            assert "actors running: 3, wanted: 3" in command("scale", run, 3)
            assert nodes.until(4, PATIENCE), nodes.seen
            node_of = {name: process["node"] for name, process in work.processes.items()}
            actor_nodes = {node_of[f"actor-{slot}"] for slot in range(3)}
            assert len(actor_nodes) == 3 and node_of["learner"] not in actor_nodes
            work.advance(60)
            assert "actors running: 1, wanted: 1" in command("scale", run, 1)
            assert nodes.until(2, PATIENCE), nodes.seen
            work.advance(60)
            assert not any(work.restarts(name) for name in work.processes)
            assert work.stop().acknowledged > 10
        assert nodes.until(1, PATIENCE), nodes.seen
    assert max(nodes.seen) == 4
