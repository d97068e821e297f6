"""The private cluster: its token, its addresses, its metrics."""

import os
import shutil
from pathlib import Path
from urllib.request import urlopen

import pytest
import ray

from m3pc.ray_nodes.connection import connected
from m3pc.ray_nodes.processes import descendants
from m3pc.types import InputError
from tests.support.servers.ray_nodes import listeners
from tests.support.servers.waiting import eventually


@pytest.mark.ray
def test_a_private_cluster_has_a_token_that_only_its_owner_reads(ray_cluster: None) -> None:
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.ray
def test_the_node_of_a_private_cluster_has_an_address_on_loopback(ray_cluster: None) -> None:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    assert [node["NodeManagerAddress"] for node in nodes] == ["127.0.0.1"]


@pytest.mark.ray
@pytest.mark.skipif(not shutil.which("ss"), reason="`ss` is not installed")
def test_a_private_cluster_listens_on_loopback_only(ray_cluster: None) -> None:
    listening = listeners(descendants([os.getpid()]))
    assert len(listening) >= 5
    assert set().union(*listening.values()) == {"127.0.0.1"}


@pytest.mark.ray
def test_a_private_cluster_has_metrics_for_prometheus(ray_cluster: None) -> None:
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def served() -> bool:
        with urlopen(url, timeout=10) as answer:
            text = answer.read()
        return b"ray_node_cpu_count" in text and b"ray_gcs_actors_count" in text

    assert eventually(served, 60)


def test_an_address_where_nothing_listens_is_refused() -> None:
    with (
        pytest.raises(InputError, match="no connection to Ray"),
        connected("127.0.0.1:9", namespace="n"),
    ):
        pass
