"""Connections to the server: who says too little is let go, so that others find a place."""

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from m3pc.serving import connection
from m3pc.serving.server import PlannerServer, config
from tests.support.servers.waiting import PATIENCE, eventually

SHORT = 0.2  # seconds for a head
PLACES = 68  # of a server for one robot


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says `ok`, of /slow after longer than a head may take."""
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * SHORT)
    length = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def listening() -> Iterator[int]:
    """Its port."""
    server = PlannerServer(config(app, sessions=1))
    with socket.create_server(("127.0.0.1", 0)) as own:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([own])))
        thread.start()
        try:
            assert eventually(lambda: server.started)
            yield int(own.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connection, "HEAD_SECONDS", SHORT)
    with listening() as found:
        yield found


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def asked(port: int, path: str = "/") -> int:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        link.request("GET", path)
        return link.getresponse().status
    finally:
        link.close()


def test_silent_connections_keep_nobody_out(port: int) -> None:
    silent = [connected(port) for _ in range(PLACES)]
    try:
        assert [link.recv(1) for link in silent] == [b""] * PLACES, "each is closed"
        assert eventually(lambda: asked(port) == 200)
    finally:
        for link in silent:
            link.close()


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["1st", "2nd"])
def test_a_head_that_drips_is_cut_off(port: int, before: bytes) -> None:
    """Also that of a request after another one, for which a silent connection has longer."""
    with connected(port) as link:
        link.sendall(before)
        answer = b""
        while before and not answer.endswith(b"ok"):
            answer += link.recv(1000)
        link.setblocking(False)
        sent = 0

        def is_closed() -> bool:
            nonlocal sent
            try:
                sent += link.send(b"G" if sent == 0 else b"E")
                return link.recv(1) == b""
            except BlockingIOError:
                time.sleep(SHORT / 10)
                return False
            except OSError:
                return True

        assert eventually(is_closed)
    assert sent > 1


def test_a_slow_answer_and_a_pause_between_two_questions_are_no_silence(port: int) -> None:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    link.connect()
    own = link.sock
    for path in ("/slow", "/", "/slow"):
        link.request("GET", path)
        assert link.getresponse().read() == b"ok"
        assert link.sock is own, "the same connection"
        time.sleep(2 * SHORT)
    link.close()
