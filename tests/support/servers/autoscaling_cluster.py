"""A Ray cluster under Ray's own autoscaler, whose nodes are processes of this machine.

The nodes are Ray's `fake_multinode` nodes. `ray.cluster_utils.AutoscalingCluster` would end every
Ray of the machine; here all processes are found by a variable in their environment.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from m3pc.ray_nodes.connection import LOOPBACK, LOOPBACK_ONLY
from tests.support.episodes.shared_data import ROOT
from tests.support.servers.ray_nodes import Nodes, nodes
from tests.support.servers.redis_server import free_port
from tests.support.servers.waiting import eventually

HEAD = "f" * 51 + "00000"  # the node id by which Ray's fake provider knows the head
FAKE = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
ENVIRONMENT = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    **LOOPBACK_ONLY,  # fake nodes have no address: without this Ray would ask 8.8.8.8 for one
}
# `ray start --autoscaling-config` takes the first, `ray up` and KubeRay the second.
VERSIONS = {
    "v1": {"RAY_enable_autoscaler_v2": "0"},
    "v2": {
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    },
}
WATCH = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for _ in sys.stdin:
    alive = [node["Alive"] for node in ray.nodes()]
    print("nodes", sum(alive), len(alive) - sum(alive), flush=True)
"""


class Watch:
    """Counts the nodes from a process of its own, which uses none of their resources."""

    def __init__(
        self, address: str, environment: Mapping[str, str], inside: Sequence[str] = ()
    ) -> None:
        """`inside`: the command that runs another one where the cluster is reachable."""
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-c", WATCH, address],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seen: list[int] = []
        self.dead = 0

    def count(self) -> int:
        """The number of living nodes; that of dead ones is in `dead` then."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        words: list[str] = []
        while words[:1] != ["nodes"]:  # Ray itself prints when a node dies
            line = self._process.stdout.readline()
            assert line, "the process ended"
            words = line.split()
        alive, self.dead = map(int, words[1:])
        if self.seen[-1:] != [alive]:
            self.seen.append(alive)
        return alive

    def until(self, count: int, seconds: float) -> bool:
        """Whether so many nodes live in time."""
        return eventually(lambda: self.count() == count, seconds)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def autoscaling_cluster(
    version: str, *, head: dict[str, int], worker: dict[str, int], max_nodes: int
) -> Iterator[tuple[Nodes, Watch]]:
    """A head that starts up to `max_nodes` nodes like `worker` and ends those that idle for 6 s."""
    with nodes() as cluster:
        cluster.environment |= ENVIRONMENT | VERSIONS[version]
        # Its metrics have a fixed port otherwise, which another cluster may hold.
        cluster.environment["AUTOSCALER_METRIC_PORT"] = str(free_port())
        _start(cluster, _configuration(head, worker, max_nodes), head)
        watch = Watch(cluster.address, cluster.environment)
        try:
            yield cluster, watch
        finally:
            watch.end()
            cluster.kill(0)  # first the head: its monitor might start a node meanwhile


def _configuration(head: dict[str, int], worker: dict[str, int], max_nodes: int) -> dict[str, Any]:
    steps = ("initialization", "setup", "head_setup", "worker_setup")
    starts = ("head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "m3pc",
        "max_workers": max_nodes,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 10.0,
        "provider": {
            # By its module: under its own name Ray 2.60 looks for an example.yaml that is not in
            # its wheel.
            "type": "external",
            "module": FAKE,
            # All nodes have this machine's address: without this, v1 recognises no idle node and
            # ends none.
            "use_node_id_as_ip": True,
            "head_node_id": HEAD,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": head, "node_config": {}, "max_workers": 0},
            "actors": {
                "resources": worker | {"object_store_memory": 100_000_000},
                "node_config": {},
                "min_workers": 0,
                "max_workers": max_nodes,
            },
        },
        "head_node_type": "ray.head.default",
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{f"{name}_commands": [] for name in (*steps, *starts)},
        "cluster_synced_files": [],
    }


def _start(cluster: Nodes, configuration: dict[str, Any], head: dict[str, int]) -> None:
    port = free_port()
    cluster.address = f"{LOOPBACK}:{port}"
    configuration["provider"]["gcs_address"] = cluster.address
    path: Path = cluster.folder / "autoscaling.yaml"
    path.write_text(json.dumps(configuration))
    offered = {name: count for name, count in head.items() if name != "CPU"}
    cluster.start(
        cpus=head["CPU"],
        more=(
            *(f"--port={port}", f"--autoscaling-config={path}"),
            f"--resources={json.dumps(offered)}",
        ),
    )
