"""The private cluster: who may use it, what is left of it."""

import os
from pathlib import Path

import pytest
import ray

from m3pc.run.cluster.ray_node import connected
from m3pc.types import InputError


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


def test_an_address_where_nothing_listens_is_refused() -> None:
    with (
        pytest.raises(InputError, match="no connection to Ray"),
        connected("127.0.0.1:9", namespace="n"),
    ):
        pass
