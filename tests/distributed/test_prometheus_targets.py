"""The files by which Prometheus discovers a run."""

import json
import threading
from pathlib import Path

import pytest

from m3pc.distributed.metrics_endpoint import (
    MetricsEndpoint,
    parse_metrics_endpoint,
    published_metrics,
)
from m3pc.distributed.prometheus_targets import TargetsFile
from m3pc.types import InputError
from tests.support.servers.redis_server import free_port
from tests.support.servers.waiting import eventually


def read(path: Path) -> object:
    return json.loads(path.read_text())


def test_a_run_is_found_while_it_is_driven(tmp_path: Path) -> None:
    own, ray = tmp_path / "t" / "hopper.m3pc.json", tmp_path / "t" / "hopper.ray.json"
    with TargetsFile(tmp_path / "t", "hopper", "127.0.0.1:9400", nodes=lambda: ["10.0.0.1:8080"]):
        labels = {"job": "m3pc", "run": "hopper"}
        assert read(own) == [{"targets": ["127.0.0.1:9400"], "labels": labels}]
        assert eventually(ray.exists)
        labels = {"job": "ray", "run": "hopper"}
        assert read(ray) == [{"targets": ["10.0.0.1:8080"], "labels": labels}]
    assert list((tmp_path / "t").iterdir()) == []


def test_new_nodes_are_added(tmp_path: Path) -> None:
    nodes, path = ["a:1"], tmp_path / "run.ray.json"
    with TargetsFile(tmp_path, "run", "127.0.0.1:1", nodes=lambda: nodes, poll_seconds=0.01):
        nodes.append("b:2")
        assert eventually(lambda: path.exists() and read(path)[0]["targets"] == nodes)  # type: ignore[index]


def test_a_head_that_is_away_is_polled_again(tmp_path: Path) -> None:
    polls = []

    def away() -> list[str]:
        polls.append(1)
        if len(polls) < 3:
            raise RuntimeError("no GCS")
        return ["a:1"]

    with TargetsFile(tmp_path, "run", "127.0.0.1:1", nodes=away, poll_seconds=0.01):
        assert eventually((tmp_path / "run.ray.json").exists)


def test_a_head_that_never_answers_does_not_delay_the_end_of_a_run(tmp_path: Path) -> None:
    released = threading.Event()

    def hang() -> list[str]:
        released.wait(30)
        return ["late:1"]

    with TargetsFile(tmp_path, "run", "127.0.0.1:1", nodes=hang, stop_seconds=0.05):
        pass
    released.set()
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize("address", ["", "here", "9400", ":9400", "127.0.0.1:", "a:b", "a:70000"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="--metrics is"):
        parse_metrics_endpoint(address)


def test_where_metrics_are_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("M3PC_TARGETS", raising=False)
    assert parse_metrics_endpoint("off") is None
    assert parse_metrics_endpoint("auto") == MetricsEndpoint()
    assert parse_metrics_endpoint("[::1]:80") == MetricsEndpoint(host="::1", port=80)
    monkeypatch.setenv("M3PC_TARGETS", str(tmp_path))
    assert parse_metrics_endpoint("10.0.0.1:9400") == MetricsEndpoint(
        host="10.0.0.1", port=9400, targets=tmp_path
    )


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    endpoint = MetricsEndpoint(port=free_port())
    with (
        published_metrics(tmp_path, endpoint),
        pytest.raises(InputError, match="no metrics can be served at"),
        published_metrics(tmp_path, endpoint),
    ):
        pass


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    with (
        pytest.raises(InputError, match="0644"),
        published_metrics(tmp_path, MetricsEndpoint(token=token)),
    ):
        pass
