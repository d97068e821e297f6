"""`m3pc serve` as users start it: who comes in, what it follows, how it ends."""

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
from m3pc.robot_client import RefusedError, Planner
from m3pc.serving.server import ServeConfig, _listen, _socket
from m3pc.serving.weights_follower import PublishedVersions
from m3pc.types import InputError, Version
from replay.store.store import Store
from tests.support.models.published import write as write_version
from tests.support.runs.commands import assert_one_sentence, invoke
from tests.support.servers.served import (
    PATIENCE,
    Outside,
    config,
    outside,
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


def test_a_token_is_made_for_its_owner_and_asked_for(path: Path, token: Path) -> None:
    with outside(path, token) as served:
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


def test_a_stop_answers_and_stores_what_is_open(path: Path, token: Path, tmp_path: Path) -> None:
    with outside(path, token, "--record", tmp_path / "store") as served:
        planner = served.planner()
        walk(planner, 12, name="arm")
        session = walk(planner, 3, name="leg")
        session.end([0, 0, 0], 1.0, terminated=True)
        assert served.stop() == 0
    episodes = list(Store(tmp_path / "store").episodes())
    assert sorted((len(each), each.terminated) for each in episodes) == [(3, True), (11, False)]


@pytest.mark.long
def test_episodes_that_are_lost_are_told_by_the_exit_code(
    path: Path, token: Path, tmp_path: Path
) -> None:
    """What was open when it stopped finds a disk on which nothing can be written."""
    with outside(path, token, "--record", tmp_path / "store") as served:
        walk(served.planner(), 12, name="arm")
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        assert served.stop() == 74
    assert list(Store(tmp_path / "store").episodes()) == []


def test_a_request_that_is_being_sent_when_it_stops_is_answered(path: Path, token: Path) -> None:
    with outside(path, token) as served:
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


def test_a_signal_reads_the_checkpoint_anew(token: Path, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one", weights(7))
    with outside(path, token) as served:
        planner = served.planner()
        session = walk(planner, 2)
        write_checkpoint(path, weights(8))
        served.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: planner.weights()["version"] == "0-8", PATIENCE)
        assert session.act([0.0, 0.0, 0.0], 1.0).version == "0-8"
        (path / "metadata.json").write_text("rubbish")
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
    with outside(path, token, "--follow", run) as served:
        planner = served.planner()
        session = walk(planner, 1)
        assert planner.weights()["version"] == "1-1", "from the start"
        (run / "weights" / "1-2.safetensors").write_bytes(b"rubbish")
        _publish(run, 3)
        assert eventually(lambda: planner.weights()["version"] == "1-3", PATIENCE)
        assert session.act([0.0, 0.0, 0.0]).version == "1-3"
        with pytest.raises(RefusedError) as refused:
            planner.reload()
        assert refused.value.status == 409


def test_a_run_that_is_older_than_what_is_served_is_warned_of(token: Path, tmp_path: Path) -> None:
    """Its versions never follow, and nothing else would say so."""
    newer = replace(weights(7), version=Version(epoch=5, number=1).packed)
    path = write_checkpoint(tmp_path / "one", newer)
    (tmp_path / "run").mkdir()
    _publish(tmp_path / "run", 900)
    with outside(path, token, "--follow", tmp_path / "run") as served:
        assert served.planner().weights()["version"] == "5-1"
        assert b"event=run-is-older newest=1-900 served=5-1" in served.errors
        assert served.stop() == 0


def _publish(run: Path, number: int) -> None:
    version = Version(epoch=1, number=number)
    write_version(run, to_bytes(replace(weights(number), version=version.packed)), version)


def test_only_newer_versions_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="publishes no versions"):
        PublishedVersions(tmp_path)
    _publish(tmp_path, 4)
    found = PublishedVersions(tmp_path)
    first = found.watch("weights", None, 0.0)
    assert first is not None and first.version == Version(epoch=1, number=4)
    assert found.watch("weights", first.version, 0.0) is None
    (tmp_path / "weights" / "notes.txt").write_text("not a version")
    _publish(tmp_path, 6)
    _publish(tmp_path, 5)
    second = found.watch("weights", first.version, 0.0)
    assert second is not None and second.version.number == 6


# What is refused before anything listens

REFUSED = {
    "nobody is said to be let in": ([], "give --token-file FILE"),
    "both": (["--token-file", "token", "--insecure-without-token"], "and not both"),
    "everybody from everywhere": (
        ["--insecure-without-token", "--host", "0.0.0.0"],
        "where others could move your robots",
    ),
    "a mode that there is not": (
        ["--insecure-without-token", "--planner", "x"],
        "planner.mode",
    ),
    "a goal for all": (["--insecure-without-token", "--planner", "goal"], "needs states to reach"),
    "what training settled": (
        ["--insecure-without-token", "--set", "model.width=8"],
        "settled by training",
    ),
    "no run": (["--insecure-without-token", "--follow", "nowhere"], "publishes no versions"),
    "no address": (["--insecure-without-token", "--host", "127.0.0.256"], "where others could"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_checkpoint(tmp_path / "one", weights(settings=config(model__width=16)))
    monkeypatch.chdir(tmp_path)
    options, words = REFUSED[kind]
    assert_one_sentence(invoke(capsys, monkeypatch, "serve", path, "--port", "0", *options), words)


@pytest.mark.parametrize("option", ["--idle-minutes", "--deadline-ms", "--ratio"])
@pytest.mark.parametrize("number", ["nan", "inf", "1e9", "-1"])
def test_times_and_ratios_have_bounds(
    path: Path,
    option: str,
    number: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = invoke(capsys, monkeypatch, "serve", path, "--insecure-without-token", option, number)
    assert done.code == 2 and option in done.errors


def test_a_token_that_others_may_read_is_refused(
    path: Path, token: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token.write_text("secret")
    token.chmod(0o644)
    done = invoke(capsys, monkeypatch, "serve", path, "--port", "0", "--token-file", token)
    assert_one_sentence(done, "has mode 0644")
    assert "secret" not in done.errors


def test_a_port_that_is_taken_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = invoke(
            capsys, monkeypatch, "serve", path, "--port", str(port), "--insecure-without-token"
        )
    assert_one_sentence(done, f"nothing can listen at 127.0.0.1:{port}")


@pytest.fixture(scope="module")
def running(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    with outside(path, tmp_path_factory.mktemp("entry") / "token") as found:
        yield found


RAW = {
    "no request": b"rubbish\r\n\r\n",
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
def test_bytes_that_are_no_request_hurt_nobody(running: Outside, kind: str) -> None:
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE) as link:
        try:
            link.sendall(RAW[kind])
            link.shutdown(socket.SHUT_WR)
            answer = link.recv(100)
        except OSError:
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 5")
    assert running.planner().weights()["version"] == "0-7"


def test_nothing_is_accepted_before_there_is_an_answer() -> None:
    """The port is taken from the start, so that nobody else gets it."""
    order = ServeConfig(path=Path(), port=0)
    with _socket(order) as own:
        port = own.getsockname()[1]
        assert not _listens(port)
        with pytest.raises(OSError), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        _listen(own, order)
        assert _listens(port)


def test_who_began_to_listen_meanwhile_is_told_of() -> None:
    order = ServeConfig(path=Path(), port=0)
    with _socket(order) as own, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(own.getsockname())
        other.listen()
        with pytest.raises(InputError, match="nothing can listen at"):
            _listen(own, order)


def test_small_answers_leave_at_once() -> None:
    """A listening socket must say that it is TCP, or each answer waits for the client's next."""
    with _socket(ServeConfig(path=Path(), port=0)) as found:
        assert found.proto == socket.IPPROTO_TCP


def test_files_of_the_process_are_few(running: Outside) -> None:
    """Connections that were closed are let go."""

    def count() -> int:
        return len(os.listdir(f"/proc/{running.process.pid}/fd"))

    before = count()
    for _ in range(20):
        with running.planner() as planner:
            planner.weights()
    assert eventually(lambda: count() <= before + 2)
