"""A run on a cluster of several nodes that was there before it: `--address`."""

from pathlib import Path

import pytest

from m3pc.ray_nodes.connection import LOOPBACK
from tests.support.runs.fleet_runs import FLEET
from tests.support.runs.online_job import job
from tests.support.runs.small_online import new_run
from tests.support.servers.ray_nodes import nodes
from tests.support.servers.redis_server import free_port


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_run_goes_on_when_one_of_its_nodes_dies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    on_gpus = {"fleet__planner_gpus": 1.0, "fleet__learner_gpus": 1.0}
    new_run(run, **FLEET | on_gpus)
    with nodes() as cluster:
        cluster.start(cpus=4, gpus=2)
        cluster.start(cpus=2)
        with job(run, "--address", cluster.address, **cluster.environment) as work:
            work.until_up(2)
            nodes_of = {name: process["node"] for name, process in work.processes.items()}
            assert nodes_of["planner-0"] == nodes_of["learner"], "where the GPUs are"
            assert nodes_of["actor-0"] != nodes_of["actor-1"], "they are spread"
            work.advance(30)
            cluster.kill(1)
            work.until(lambda: work.restarts("actor-0") + work.restarts("actor-1"))
            work.until_up(2)
            work.advance(30)
            assert work.stop().acknowledged > 5


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
