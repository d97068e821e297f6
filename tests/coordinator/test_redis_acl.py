"""The Redis users that docker/prepare.sh makes: each can do its work, and nothing else."""

import hashlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from m3pc.coordinator import connect
from m3pc.ray_nodes.gcs_storage import parse_gcs_store, record_namespace
from tests.support.episodes.shared_data import ROOT
from tests.support.servers.coordinators import pointer
from tests.support.servers.redis_server import COMMANDS, MISSING, free_port

PREPARE = ROOT / "docker" / "prepare.sh"


def unprivileged_client(port: int, **credentials: str | None) -> Any:
    """Tries each call once."""
    once = Retry(NoBackoff(), 0)
    return cast(Any, redis.Redis)(port=port, protocol=2, retry=once, **credentials)


class Served:
    """A real server with the shipped users."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip(MISSING)
        shutil.copy(PREPARE, folder)
        subprocess.run(["sh", str(folder / PREPARE.name)], check=True, timeout=60)
        secrets = folder / "secrets"
        self.users = (secrets / "redis_users.acl").read_text()
        self.port = free_port()
        self._urls = {
            name: (secrets / f"{part}_url").read_text()
            for name, part in (("m3pc", "coordinator"), ("ray", "gcs"))
        }
        self.process = subprocess.Popen(
            [
                *(program, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--aclfile", str(secrets / "redis_users.acl"), "--save", ""),
                *("--logfile", str(folder / "redis.log"), "--dir", str(folder)),
            ]
        )
        if not self._answers():
            self.close()
            raise AssertionError((folder / "redis.log").read_text())

    def _answers(self) -> bool:
        for _ in range(400):
            try:
                unprivileged_client(self.port).ping()
            except redis.AuthenticationError:
                return True
            except redis.ConnectionError:
                time.sleep(0.05)
            else:
                return False  # it asks for no password
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def url(self, user: str) -> str:
        return self._urls[user].replace("@redis:6390", f"@127.0.0.1:{self.port}")

    def password(self, user: str) -> str:
        return urlsplit(self._urls[user]).password or ""

    def client(self, user: str) -> Any:
        return cast(Any, redis.Redis).from_url(self.url(user), protocol=2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


def test_its_rights_are_enough_for_a_coordinator(served: Served, tmp_path: Path) -> None:
    """One of each call, and a loss of everything."""
    client = connect(served.url("m3pc"), run="acl", generations=tmp_path)
    assert client.heartbeat(0, client.register(0))
    epoch = client.new_epoch("weights")
    client.publish("weights", pointer(1, epoch))
    with served.client("m3pc") as other:
        for kind in ("marker", "clock", "slots", "pointers"):
            other.delete(f"m3pc:{{acl}}:{kind}")
    assert client.heartbeat(0, 1)
    assert client.read("weights") == pointer(1, epoch)
    client.close()


def test_its_rights_are_enough_for_the_store_of_ray(served: Served, tmp_path: Path) -> None:
    store = parse_gcs_store(served.url("ray").removesuffix("/0"))
    store.check()
    record_namespace(store, tmp_path)
    with served.client("ray") as client:
        client.hset(f"RAY{store.namespace}@NODE", "x", "y")
        store.clear()
        assert client.exists(f"RAY{store.namespace}@NODE") == 0


REFUSED = (
    *("FLUSHALL", "FLUSHDB", "CONFIG GET *", "KEYS *", "SHUTDOWN NOSAVE", "SAVE"),
    *("ACL LIST", "MODULE LIST", "MONITOR", "REPLICAOF 127.0.0.1 1", "CLIENT LIST", "GET other"),
    *("HSET other a b", "EVAL return(1) 0", "SUBSCRIBE any", "PUBLISH any x"),
)


@pytest.mark.parametrize("user", ["m3pc", "ray"])
@pytest.mark.parametrize("command", REFUSED)
def test_neither_user_may_do_anything_else(command: str, user: str, served: Served) -> None:
    with served.client(user) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command.split())
    assert served.process.poll() is None


@pytest.mark.parametrize(("user", "key"), [("m3pc", "RAYm3pc@NODE"), ("ray", "m3pc:{run}:slots")])
def test_neither_user_reaches_the_keys_of_the_other(user: str, key: str, served: Served) -> None:
    with served.client(user) as client:
        for command in (("HSET", key, "a", "b"), ("DEL", key), ("HGETALL", key)):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)


@pytest.mark.parametrize(
    "body",
    ["redis.call('FLUSHALL')", "redis.call('KEYS', '*')", "redis.call('HGET', 'other', 'a')"],
)
def test_a_script_has_no_more_rights_than_the_user_that_runs_it(body: str, served: Served) -> None:
    """The coordinator may load scripts, so a user with its password may load any."""
    with served.client("m3pc") as client:
        digest = client.execute_command("SCRIPT LOAD", f"return {body}")
        with pytest.raises(redis.ResponseError, match=r"can't (run|access)"):
            client.execute_command("EVALSHA", digest, 0)


def test_without_a_password_every_user_is_refused(served: Served) -> None:
    for user, password in ((None, None), ("default", "x"), ("m3pc", "x"), ("ray", "")):
        client = unprivileged_client(served.port, username=user, password=password)
        with pytest.raises((redis.AuthenticationError, redis.ResponseError)):
            client.ping()
        client.close()


def test_the_users_file_holds_hashes_and_the_commands_that_the_tests_allow(served: Served) -> None:
    [line] = re.findall("^user m3pc .*$", served.users, re.MULTILINE)
    assert f"#{hashlib.sha256(served.password('m3pc').encode()).hexdigest()}" in line
    assert not any(served.password(user) in served.users for user in ("m3pc", "ray"))
    granted = {word[1:] for word in line.split() if word.startswith("+")}
    assert granted == {*COMMANDS.split(), "ping"}
