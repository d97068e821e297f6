"""Connections that send too little are closed, so that others find room."""

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from m3pc.serving.server import PlannerServer, server_config
from tests.support.servers.waiting import PATIENCE, eventually

SHORT = 0.2  # seconds for a head
MAX_CONNECTIONS = 68  # of a server for one robot


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers `ok`; to /slow it takes longer than a head may."""
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * SHORT)
    length = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that waits for a head for a short time."""
    server = PlannerServer(server_config(app, max_sessions=1, head_seconds=SHORT))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            assert eventually(lambda: server.started)
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def get(port: int, path: str = "/") -> int:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        link.request("GET", path)
        return link.getresponse().status
    finally:
        link.close()


def test_silent_connections_keep_nobody_out(port: int) -> None:
    silent = [connected(port) for _ in range(MAX_CONNECTIONS)]
    try:
        assert [link.recv(1) for link in silent] == [b""] * MAX_CONNECTIONS, "each is closed"
        assert eventually(lambda: get(port) == 200)
    finally:
        for link in silent:
            link.close()


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["1st", "2nd"])
def test_a_head_that_drips_is_cut_off(port: int, before: bytes) -> None:
    """Also that of a second request, before which a connection may be silent for longer."""
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


def test_a_slow_answer_and_a_pause_between_two_requests_do_not_count_as_silence(port: int) -> None:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    link.connect()
    first = link.sock
    for path in ("/slow", "/", "/slow"):
        link.request("GET", path)
        assert link.getresponse().read() == b"ok"
        assert link.sock is first, "the same connection"
        time.sleep(2 * SHORT)
    link.close()
