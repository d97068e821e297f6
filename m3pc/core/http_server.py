"""A small HTTP server: GET only, few at a time, none of them for long.

A page of a stranger's site may send requests from a browser on this machine: under a name that the
stranger owns, or with their site's name beside it. Both are refused.
"""

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

MOST_CONNECTIONS: Final = 8  # at once; more are closed unanswered
READ_SECONDS, CONNECTION_SECONDS = 5.0, 10.0
STOP_SECONDS = 5.0
TEXT: Final = "text/plain; charset=utf-8"

log = logging.getLogger(__name__)


class HttpReply(NamedTuple):
    status: int
    content: bytes
    kind: str = TEXT


ReplyFn = Callable[[str, str], HttpReply]  # of a path and of what the header Authorization says


class GuardedServer:
    """Answers in threads of its own until it is closed."""

    def __init__(self, host: str, port: int, answer: ReplyFn) -> None:
        self._server = _Server((host, port), answer)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(STOP_SECONDS)
        self._server.server_close()

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.2)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False  # two runs on one port would take each other's scrapes
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], answer: ReplyFn) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.answer, self._room = answer, threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Whatever the other side does, it has so many seconds in all."""
        end = threading.Timer(CONNECTION_SECONDS, _cut, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("event=request-failed client=%s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_SECONDS
    server_version, sys_version = "m3pc", ""

    def do_GET(self) -> None:
        path, authorization = self.path.partition("?")[0], self.headers.get("Authorization", "")
        self._send(self._refusal() or self.server.answer(path, authorization))

    def _refusal(self) -> HttpReply | None:
        if not is_own_name(self.headers.get("Host", "")):
            return HttpReply(421, b"ask by an IP address, localhost or this machine's name\n")
        if "Origin" in self.headers or self.headers.get("Sec-Fetch-Site") == "cross-site":
            return HttpReply(403, b"not for pages of other sites\n")
        return None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of whatever is no well-formed GET; nothing that was sent is said again."""
        reply = (
            HttpReply(405, b"GET only\n")
            if code == 501
            else HttpReply(code, b"this is no request\n")
        )
        self._send(reply)

    def _send(self, reply: HttpReply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(reply.content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if reply.status == 405:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.content)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("event=request what=%r", format % args)


def is_own_name(host: str) -> bool:
    """Whether a Host header is one that no stranger can own."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _cut(request: socket.socket) -> None:
    with suppress(OSError):  # it has ended meanwhile
        request.shutdown(socket.SHUT_RDWR)
