"""A run on a cluster of several nodes that was there before it: `--address`."""

from pathlib import Path

import pytest

from m3pc.ray_nodes.connection import LOOPBACK
from tests.distributed.test_fleet import FLEET
from tests.support.runs.online_job import job
from tests.support.runs.small_online import new_run
from tests.support.servers.ray_nodes import nodes
from tests.support.servers.redis_server import free_port


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_run_goes_on_when_one_of_its_nodes_dies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holds = {"fleet__actors": 4, "fleet__planner_gpus": 1.0, "fleet__learner_gpus": 1.0}
    new_run(run, **FLEET | holds)
    with nodes() as cluster:
        cluster.start(cpus=4, gpus=2)
        for _ in range(2):
            cluster.start(cpus=3)
        with job(run, "--address", cluster.address, **cluster.environment) as work:
            work.until_up(4)
            homes = {name: process["node"] for name, process in work.processes.items()}
            assert {homes[name] for name in ("planner-0", "learner")} == {homes["planner-0"]}
            actors = {homes[f"actor-{slot}"] for slot in range(4)}
            assert len(actors) >= 2, "they are spread"
            work.advance(60)
            cluster.kill(2)
            work.until(lambda: any(work.restarts(f"actor-{slot}") for slot in range(4)))
            work.until_up(4)
            work.advance(100)
            assert work.stop().acknowledged > 10


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_is_driven_through_ray_client(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET)
    port = free_port()
    with nodes() as cluster:
        cluster.start(cpus=8, more=(f"--ray-client-server-port={port}",))
        with job(run, "--address", f"ray://{LOOPBACK}:{port}", **cluster.environment) as work:
            work.until_up(2)
            work.advance(60)
            assert work.stop().acknowledged > 0
