"""`m3pc serve` as users start it: tokens, following a run, reloading, and its end."""

import http.client
import json
import os
import resource
import signal
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m3pc.model.weights import to_bytes
from m3pc.robot_client import Planner, RefusedError
from m3pc.serving.server import reserved_socket, start_listening
from m3pc.serving.weights_follower import PublishedVersions
from m3pc.types import InputError, Version
from replay.store.store import Store
from tests.support.models.published import write as write_version
from tests.support.runs.commands import Command, assert_one_sentence
from tests.support.servers.served import (
    PATIENCE,
    ServerProcess,
    as_process,
    config,
    weights,
    write_checkpoint,
)
from tests.support.servers.waiting import eventually


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "one", weights(7))


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return tmp_path / "token"


def walk(planner: Planner, steps: int, **terms: Any) -> Any:
    """A session after so many steps, each of which brought 1."""
    session = planner.session(**terms)
    for step in range(steps):
        session.act([0.0, 0.0, 0.1 * step], 1.0 if step else None)
    return session


def test_a_token_is_made_readable_by_its_owner_and_required(path: Path, token: Path) -> None:
    with as_process(path, token) as served:
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert served.planner().weights()["version"] == "0-7"
        for other in (None, "wrong"):
            with (
                Planner(served.address, other, timeout=PATIENCE) as planner,
                pytest.raises(RefusedError) as refused,
            ):
                planner.weights()
            assert refused.value.status == 401
        code = served.stop()
    assert code == 0
    assert token.read_text().encode() not in served.errors


def test_a_stop_stores_open_sessions(path: Path, token: Path, tmp_path: Path) -> None:
    with as_process(path, token, "--record", tmp_path / "store") as served:
        planner = served.planner()
        walk(planner, 12, name="arm")
        session = walk(planner, 3, name="leg")
        session.end([0, 0, 0], 1.0, terminated=True)
        assert served.stop() == 0
    episodes = list(Store(tmp_path / "store").episodes())
    assert sorted((len(e), e.terminated) for e in episodes) == [(3, True), (11, False)]


@pytest.mark.long
def test_lost_episodes_change_the_exit_code(path: Path, token: Path, tmp_path: Path) -> None:
    """When it stops, the disk of the open session's episode cannot be written."""
    with as_process(path, token, "--record", tmp_path / "store") as served:
        walk(served.planner(), 12, name="arm")
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        assert served.stop() == 74
    assert list(Store(tmp_path / "store").episodes()) == []


def test_a_request_in_progress_at_the_stop_is_answered(path: Path, token: Path) -> None:
    with as_process(path, token) as served:
        served.planner().weights()
        head = f"POST /v1/weights HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {served.token}\r\n"
        with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as link:
            body = b" " * 10
            link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
            with ThreadPoolExecutor(1) as pool:
                code = pool.submit(served.stop)
                assert eventually(lambda: not _listens(served.port))
                link.sendall(body[5:])
                response = http.client.HTTPResponse(link)
                response.begin()
                assert response.status == 200
                assert json.loads(response.read())["version"] == "0-7"
                assert code.result(PATIENCE) == 0


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_a_signal_reloads_the_checkpoint(token: Path, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one", weights(7))
    with as_process(path, token) as served:
        planner = served.planner()
        session = walk(planner, 2)
        write_checkpoint(path, weights(8))
        served.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: planner.weights()["version"] == "0-8", PATIENCE)
        assert session.act([0.0, 0.0, 0.0], 1.0).version == "0-8"
        (path / "metadata.json").write_text("not JSON")
        served.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: b"event=weights-not-taken" in served.errors, PATIENCE)
        assert planner.weights()["version"] == "0-8"
        assert session.act([0.0, 0.0, 0.0], 1.0).version == "0-8"
        assert served.stop() == 0
    assert b"Traceback" not in served.errors


def test_newer_versions_of_a_run_are_followed(path: Path, token: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    _publish(run, 1)
    with as_process(path, token, "--follow", run) as served:
        planner = served.planner()
        session = walk(planner, 1)
        assert planner.weights()["version"] == "1-1", "from the start"
        (run / "weights" / "1-2.safetensors").write_bytes(b"not JSON")
        _publish(run, 3)
        assert eventually(lambda: planner.weights()["version"] == "1-3", PATIENCE)
        assert session.act([0.0, 0.0, 0.0]).version == "1-3"
        with pytest.raises(RefusedError) as refused:
            planner.reload()
        assert refused.value.status == 409


def test_following_an_older_run_is_logged(token: Path, tmp_path: Path) -> None:
    """Its versions are never taken, and only this line says so."""
    newer = replace(weights(7), version=Version(epoch=5, number=1).packed)
    path = write_checkpoint(tmp_path / "one", newer)
    (tmp_path / "run").mkdir()
    _publish(tmp_path / "run", 900)
    with as_process(path, token, "--follow", tmp_path / "run") as served:
        assert served.planner().weights()["version"] == "5-1"
        assert b"event=run-is-older newest=1-900 served=5-1" in served.errors
        assert served.stop() == 0


def _publish(run: Path, number: int) -> None:
    version = Version(epoch=1, number=number)
    write_version(run, to_bytes(replace(weights(number), version=version.packed)), version)


def test_only_newer_versions_are_returned(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="publishes no versions"):
        PublishedVersions(tmp_path)
    _publish(tmp_path, 4)
    versions = PublishedVersions(tmp_path)
    first = versions.watch("weights", None, 0.0)
    assert first is not None and first.version == Version(epoch=1, number=4)
    assert versions.watch("weights", first.version, 0.0) is None
    (tmp_path / "weights" / "notes.txt").write_text("not a version")
    _publish(tmp_path, 6)
    _publish(tmp_path, 5)
    second = versions.watch("weights", first.version, 0.0)
    assert second is not None and second.version.number == 6


# What is refused before anything listens

REFUSED = {
    "neither": ([], "give --token-file FILE"),
    "both": (["--token-file", "token", "--insecure-without-token"], "but not both"),
    "every address": (
        ["--insecure-without-token", "--host", "0.0.0.0"],
        "where others could move your robots",
    ),
    "an unknown mode": (
        ["--insecure-without-token", "--planner", "x"],
        "planner.mode",
    ),
    "a goal mode": (["--insecure-without-token", "--planner", "goal"], "needs states to reach"),
    "settled by training": (
        ["--insecure-without-token", "--set", "model.width=8"],
        "settled by training",
    ),
    "no run": (["--insecure-without-token", "--follow", "nowhere"], "publishes no versions"),
    "no address": (["--insecure-without-token", "--host", "127.0.0.256"], "where others could"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m3pc: Command
) -> None:
    path = write_checkpoint(tmp_path / "one", weights(settings=config(model__width=16)))
    monkeypatch.chdir(tmp_path)
    options, words = REFUSED[kind]
    assert_one_sentence(m3pc("serve", path, "--port", "0", *options), words)


@pytest.mark.parametrize("option", ["--idle-minutes", "--deadline-ms", "--ratio"])
@pytest.mark.parametrize("number", ["nan", "inf", "1e9", "-1"])
def test_times_and_ratios_have_bounds(path: Path, option: str, number: str, m3pc: Command) -> None:
    done = m3pc("serve", path, "--insecure-without-token", option, number)
    assert done.code == 2 and option in done.errors


def test_a_token_that_others_may_read_is_refused(path: Path, token: Path, m3pc: Command) -> None:
    token.write_text("secret")
    token.chmod(0o644)
    done = m3pc("serve", path, "--port", "0", "--token-file", token)
    assert_one_sentence(done, "has mode 0644")
    assert "secret" not in done.errors


def test_a_port_that_is_taken_is_refused(path: Path, m3pc: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = m3pc("serve", path, "--port", str(port), "--insecure-without-token")
    assert_one_sentence(done, f"nothing can listen at 127.0.0.1:{port}")


@pytest.fixture(scope="module")
def running(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with as_process(path, tmp_path_factory.mktemp("entry") / "token") as server:
        yield server


RAW = {
    "no request": b"nonsense\r\n\r\n",
    "no version": b"GET /livez\r\n\r\n",
    "a head without end": b"GET /livez HTTP/1.1\r\nX: " + b"a" * 200_000,
    "two lengths": b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\n",
    "a length that is none": b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    "bytes for a path": b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
    "a socket that stays": b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
}


@pytest.mark.parametrize("kind", RAW)
def test_malformed_bytes_do_not_stop_the_server(running: ServerProcess, kind: str) -> None:
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE) as link:
        try:
            link.sendall(RAW[kind])
            link.shutdown(socket.SHUT_WR)
            answer = link.recv(100)
        except OSError:
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 5")
    assert running.planner().weights()["version"] == "0-7"


def test_no_connection_is_accepted_before_the_server_can_answer() -> None:
    """The port is reserved from the start, so that no other process gets it."""
    with reserved_socket("127.0.0.1", 0) as own:
        port = own.getsockname()[1]
        assert not _listens(port)
        with pytest.raises(OSError), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        start_listening(own)
        assert _listens(port)


def test_a_process_that_listens_at_the_port_meanwhile_is_an_error() -> None:
    with reserved_socket("127.0.0.1", 0) as own, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(own.getsockname())
        other.listen()
        with pytest.raises(InputError, match="nothing can listen at"):
            start_listening(own)


def test_small_answers_are_sent_at_once() -> None:
    """A listening socket must say that it is TCP, or each answer waits for the client's next."""
    with reserved_socket("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_closed_connections_free_their_files(running: ServerProcess) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{running.process.pid}/fd"))

    before = count()
    for _ in range(20):
        with running.planner() as planner:
            planner.weights()
    assert eventually(lambda: count() <= before + 2)
