"""The files by which Prometheus finds a run."""

import json
import threading
from pathlib import Path

import pytest

from m3pc.distributed import prometheus_targets as module
from m3pc.distributed.metrics_endpoint import MetricsEndpoint, scraped, told_metrics
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


def test_nodes_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.01)
    nodes, path = ["a:1"], tmp_path / "run.ray.json"
    with TargetsFile(tmp_path, "run", "127.0.0.1:1", nodes=lambda: nodes):
        nodes.append("b:2")
        assert eventually(lambda: path.exists() and read(path)[0]["targets"] == nodes)  # type: ignore[index]


def test_a_head_that_is_away_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.01)
    asked = []

    def away() -> list[str]:
        asked.append(1)
        if len(asked) < 3:
            raise RuntimeError("no GCS")
        return ["a:1"]

    with TargetsFile(tmp_path, "run", "127.0.0.1:1", nodes=away):
        assert eventually((tmp_path / "run.ray.json").exists)


def test_a_head_that_never_answers_does_not_keep_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.05)
    for_ever = threading.Event()

    def hang() -> list[str]:
        for_ever.wait(30)
        return ["late:1"]

    with TargetsFile(tmp_path, "run", "127.0.0.1:1", nodes=hang):
        pass
    for_ever.set()
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize("where", ["", "here", "9400", ":9400", "127.0.0.1:", "a:b", "a:70000"])
def test_an_address_that_is_none_is_told(where: str) -> None:
    with pytest.raises(InputError, match="--metrics is"):
        scraped(where)


def test_where_metrics_are_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("M3PC_TARGETS", raising=False)
    assert scraped("off") is None
    assert scraped("auto") == MetricsEndpoint()
    assert scraped("[::1]:80") == MetricsEndpoint(host="::1", port=80)
    monkeypatch.setenv("M3PC_TARGETS", str(tmp_path))
    assert scraped("10.0.0.1:9400") == MetricsEndpoint(host="10.0.0.1", port=9400, targets=tmp_path)


def test_a_port_that_is_taken_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ray_addresses", lambda: [])
    where = MetricsEndpoint(port=free_port())
    with (
        told_metrics(tmp_path, where),
        pytest.raises(InputError, match="no metrics can be served at"),
        told_metrics(tmp_path, where),
    ):
        pass


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    with (
        pytest.raises(InputError, match="0644"),
        told_metrics(tmp_path, MetricsEndpoint(token=token)),
    ):
        pass
