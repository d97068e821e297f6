"""A node without Ray: its settings, and what happens when one of its processes ends."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from m3pc.ray_nodes.gcs_storage import GcsStore
from m3pc.ray_nodes.node import (
    FOLDER_VARIABLE,
    MAX_FOLDER_BYTES,
    Node,
    check_ip,
    default_folder,
    own_address,
    require_short_path,
)
from m3pc.ray_nodes.ports import node_ports
from m3pc.ray_nodes.processes import (
    command_of,
    descendants,
    find_by_variable,
    send_signal,
)
from m3pc.types import InputError
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.online_job import alive
from tests.support.servers.processes import program_name
from tests.support.servers.ray_nodes import bare_environment, free_ports
from tests.support.servers.waiting import eventually

GCS, RAYLET, OTHER = "gcs_server", "raylet", "log_monitor"


def node(**changes: object) -> Node:
    defaults = {
        "head_address": None,
        "ip": "127.0.0.1",
        "ports": node_ports(),
        "token": Path("/t/token"),
    }
    return Node(**{"folder": Path("/t"), **defaults, **changes})  # type: ignore[arg-type]


def test_the_settings_of_a_head_are_in_its_command_and_its_secrets_are_not() -> None:
    store = GcsStore(host="h", port=1, user="u", password="hidden", namespace="n")
    head = node(cpus=4, gpus=0, roles=("actor", "learner"), store=store)
    words, environment = head.command(), head.environment({"M3PC_RAY_REDIS": "hidden"})
    for word in (
        *("--head", "--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1", "--port=6379"),
        *("--num-cpus=4", "--num-gpus=0", "--redis-username=u", "--temp-dir=/t/r"),
        '--resources={"m3pc_actor": 1000, "m3pc_learner": 1000}',
    ):
        assert word in words
    assert "hidden" not in " ".join(words) + repr(head)
    assert [key for key, value in environment.items() if value == "hidden"] == [
        "RAY_REDIS_PASSWORD"
    ]
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/t/token"
    assert environment["RAY_external_storage_namespace"] == "n"


def test_outer_settings_of_tokens_and_redis_do_not_reach_a_node() -> None:
    outside = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN": "x",
        "RAY_AUTH_TOKEN_PATH": "/other",
        "RAY_REDIS_ADDRESS": "other:1",
        "RAY_ADDRESS": "other:2",
        "RAY_health_check_period_ms": "7",
    }
    variables = node().environment(outside)
    assert (variables["RAY_AUTH_MODE"], variables["RAY_AUTH_TOKEN_PATH"]) == ("token", "/t/token")
    assert not {"RAY_AUTH_TOKEN", "RAY_REDIS_ADDRESS", "RAY_ADDRESS"} & variables.keys()
    assert variables["RAY_health_check_period_ms"] == "7"  # any other setting stays the user's
    assert node(token=None).environment({})["RAY_AUTH_MODE"] == "disabled"


def test_only_a_node_on_loopback_disables_clusters() -> None:
    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert node().environment({})[variable] == "0"
    assert variable not in node(ip="10.0.0.1").environment({})


def test_a_public_address_without_tls_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None)
    for ip, environment, warned in (
        ("127.0.0.1", {}, ""),
        ("10.1.2.3", {}, ""),
        ("8.8.4.4", {}, "public-address-without-tls"),
        ("8.8.4.4", {"RAY_USE_TLS": "1"}, ""),
        ("127.0.0.2", {}, "listens-everywhere"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert check_ip(ip, environment) == ip
        assert [warned in record.message for record in caplog.records] == [True] * bool(warned)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InputError, match="not an address of this machine"):
        check_ip("192.0.2.1", {})
    with pytest.raises(InputError, match="no address"):
        check_ip("300.1.1.1", {})


def test_a_worker_takes_the_address_that_the_head_sees() -> None:
    assert own_address("127.0.0.1:6379") == "127.0.0.1"
    for wrong in ("6379", "host", "host:port"):
        with pytest.raises(InputError, match="give HOST:PORT"):
            own_address(wrong)


def test_a_folder_in_which_sockets_would_have_too_long_names_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InputError, match="too long for Linux"):
        require_short_path(Path("/tmp") / ("x" * MAX_FOLDER_BYTES))
    session = "/r/session_2026-11-18_03-54-33_355254_4194304/sockets/plasma_store"
    assert MAX_FOLDER_BYTES + len(session) < 107
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert default_folder(6379) == Path(f"/tmp/m3pc-{os.getuid()}-6379")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    assert default_folder(6379).parent == Path("/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run")
    assert default_folder(6379).parent == Path("/run")


class Watched:
    """A watch in a process of its own: it adopts and waits for whatever is below it."""

    def __init__(self, folder: Path, *names: str, joins: str = "", redis: str = "") -> None:
        self.folder, self.log = folder, folder / "log"
        for program in names:
            if not (folder / program).exists():
                shutil.copy("/bin/sleep", folder / program)
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.children.node_child",
                    str(folder),
                    joins,
                    redis,
                    *names,
                ],
                cwd=ROOT,
                env={**bare_environment(), "FIRST_PORT": free_ports()[0].split("=")[1]},
                stderr=file,
            )

    def until_up(self, *names: str, starts: int = 1) -> dict[str, int]:
        """Wait until the node has started so often, and exactly these processes run; their pids."""
        assert eventually(lambda: self.log.read_text().count("event=node-up") == starts)
        assert sorted(self.pids) == sorted(names), self.log.read_text()
        return self.pids

    @property
    def pids(self) -> dict[str, int]:
        return {program_name(pid): pid for pid in descendants([self.process.pid])}

    @property
    def starts(self) -> int:
        return len((self.folder / "starts").read_text().splitlines())

    def wait(self) -> int:
        return self.process.wait(60)


@contextmanager
def watched(folder: Path, *names: str, joins: str = "", redis: str = "") -> Iterator[Watched]:
    watched_node = Watched(folder, *names, joins=joins, redis=redis)
    try:
        yield watched_node
    finally:
        watched_node.process.kill()
        watched_node.process.wait()
        send_signal(find_by_variable(FOLDER_VARIABLE, str(folder)), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_of_a_node_and_nothing_else(number: int, tmp_path: Path) -> None:
    unrelated = subprocess.Popen(["sleep", "600"])
    try:
        with watched(tmp_path, GCS, RAYLET, OTHER) as node:
            pids = node.until_up(GCS, RAYLET, OTHER)
            node.process.send_signal(number)
            assert node.wait() == 0
            assert not any(map(alive, pids.values()))
        assert alive(unrelated.pid)
    finally:
        unrelated.kill()
        unrelated.wait()


def test_a_head_without_redis_ends_with_its_gcs(tmp_path: Path) -> None:
    with watched(tmp_path, GCS, RAYLET) as node:
        pids = node.until_up(GCS, RAYLET)
        os.kill(pids[GCS], signal.SIGKILL)
        assert node.wait() == 69
        assert not alive(pids[RAYLET])
        assert "event=cluster-lost reason=gcs-ended code=-9" in node.log.read_text()


def test_a_gcs_with_its_tables_in_redis_is_restarted_but_not_indefinitely(tmp_path: Path) -> None:
    with watched(tmp_path, GCS, RAYLET, redis="yes") as node:
        pids = node.until_up(GCS, RAYLET)
        os.kill(pids[GCS], signal.SIGKILL)
        assert eventually(lambda: node.pids.get(GCS) not in (None, pids[GCS]))
        assert node.pids[RAYLET] == pids[RAYLET]
        assert command_of(node.pids[GCS]) == [str(tmp_path / GCS), "600"]
        shutil.copy("/bin/false", tmp_path / "no")
        (tmp_path / "no").rename(tmp_path / GCS)  # from now on it ends at once
        os.kill(node.pids[GCS], signal.SIGKILL)
        assert node.wait() == 69
        assert node.starts == 1
        assert "event=given-up name=gcs_server ends=5" in node.log.read_text()


def test_another_service_of_a_node_is_restarted(tmp_path: Path) -> None:
    with watched(tmp_path, GCS, RAYLET, OTHER) as node:
        pids = node.until_up(GCS, RAYLET, OTHER)
        os.kill(pids[OTHER], signal.SIGTERM)
        assert eventually(lambda: node.pids.get(OTHER) not in (None, pids[OTHER]))
        assert {key: node.pids[key] for key in (GCS, RAYLET)} == {
            key: pids[key] for key in (GCS, RAYLET)
        }
        node.process.send_signal(signal.SIGTERM)
        assert node.wait() == 0


def test_a_head_that_lost_its_raylet_ends(tmp_path: Path) -> None:
    with watched(tmp_path, GCS, RAYLET, redis="yes") as node:
        pids = node.until_up(GCS, RAYLET)
        os.kill(pids[RAYLET], signal.SIGKILL)
        assert node.wait() == 69
        assert not alive(pids[GCS])


def test_a_node_whose_raylet_ended_joins_again_as_soon_as_the_head_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with watched(tmp_path, RAYLET, OTHER, joins=address) as node:
            pids = node.until_up(RAYLET, OTHER)
            head.close()
            os.kill(pids[RAYLET], signal.SIGKILL)
            assert eventually(lambda: "event=not-joined" in node.log.read_text())
            assert not alive(pids[OTHER]), "all of a lost node ends"
            assert node.starts == 1
            port = int(address.rpartition(":")[2])
            with socket.create_server(("127.0.0.1", port)):
                assert node.until_up(RAYLET, OTHER, starts=2)[RAYLET] != pids[RAYLET]
            assert node.starts == 2
            node.process.send_signal(signal.SIGTERM)
            assert node.wait() == 0


def test_processes_of_a_killed_supervisor_are_ended_by_the_next(tmp_path: Path) -> None:
    with watched(tmp_path, GCS, RAYLET) as node:
        before = node.until_up(GCS, RAYLET)
        node.process.kill()
        node.wait()
        assert all(map(alive, before.values()))
        with watched(tmp_path, GCS, RAYLET) as another:
            after = another.until_up(GCS, RAYLET, starts=2)
            assert not any(map(alive, before.values()))
            assert not {*after.values()} & {*before.values()}
