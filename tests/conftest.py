"""Settings that must be in place before numpy is imported, and fixtures of several files.

The fixtures import what they need themselves: most tests need no torch.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it when it is imported

if TYPE_CHECKING:
    from replay.store.store import Store
    from tests.support.runs.commands import Command
    from tests.support.runs.small_run import WatchedRun
    from tests.support.servers.coordinators import Place
    from tests.support.servers.redis_server import RedisServer


@pytest.fixture
def m3pc(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> "Command":
    """The m3pc command, run in this process; see tests/support/runs/commands.py."""
    from tests.support.runs.commands import invoke

    return lambda *arguments: invoke(capsys, monkeypatch, *arguments)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> "Store":
    """Random episodes to learn from."""
    from replay.store.store import Store
    from tests.support.runs.small_run import write_data

    return Store(write_data(tmp_path_factory.mktemp("data") / "walk"))


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, data: "Store") -> "WatchedRun":
    """A small run on them that nothing stopped. Copy it before you change it."""
    from tests.support.runs.small_run import WatchedRun

    return WatchedRun(data, tmp_path_factory.mktemp("straight") / "run")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs measure less on held-out episodes."""
    from tests.support.runs.small_run import shrink_measurements

    shrink_measurements(monkeypatch)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A checkpoint."""
    from tests.support.models.small_checkpoint import write_one

    return write_one(tmp_path / "one")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["RedisServer"]:
    """One for all tests of a worker; those that stop it start their own."""
    from tests.support.servers.redis_server import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray cluster for all tests, with logical GPUs. A test kills the actors that it makes."""
    from m3pc.ray_nodes.connection import connected

    with connected(namespace="tests", cpus=8, gpus=2):
        yield


@pytest.fixture(params=["file", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Place"]:
    """A coordinator's back-end: a file or a Redis."""
    from tests.support.servers.coordinators import InFile, InRedis

    place: Place
    if request.param == "file":
        place = InFile(tmp_path)
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        place = InRedis(tmp_path, server, run=tmp_path.name)
    yield place
    place.close()
