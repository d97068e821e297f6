"""What the HTTP servers share: uvicorn with bounded connections, and checks of who may ask.

A web page may send requests from a browser on this machine: under a host name that the page's owner
controls (DNS rebinding), or with the page's origin in a header. `is_own_name` and `is_cross_site`
recognise both.
"""

import asyncio
import hmac
import ipaddress
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS: Final = 10.0
MAX_HEAD_BYTES: Final = 16 << 10  # request line and headers
BACKLOG: Final = 128  # connections that wait to be accepted
JOIN_SECONDS: Final = 5.0


class ServerConfig(uvicorn.Config):
    """HTTP/1.1 only. Requests beyond `max_connections` open connections are answered 503."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_connections: int,
        keep_alive: int,
        stop_seconds: int,
        head_seconds: float = HEAD_SECONDS,
        connection_seconds: float | None = None,
        log_level: str | None = None,
    ) -> None:
        """In seconds: `keep_alive` between two requests, `stop_seconds` for open requests when the
        server stops, `head_seconds` for the head of a request to arrive, `connection_seconds` for
        a connection in all (None: unlimited)."""
        super().__init__(
            app,
            interface="asgi3",
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=log_level,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=keep_alive,
            timeout_graceful_shutdown=stop_seconds,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            limit_concurrency=max_connections,
        )
        self.head_seconds, self.connection_seconds = head_seconds, connection_seconds


class BoundedConnection(H11Protocol):
    """Closes a connection whose request head takes too long, however slowly its bytes drip in.

    The time runs from the connect, and from the first byte of each later request.
    """

    config: ServerConfig
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()
        if self.config.connection_seconds is not None:
            self.loop.call_later(self.config.connection_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        previous = self.cycle  # uvicorn replaces `cycle` when a head is complete
        if self._head_timer is None and (not previous or previous.response_complete):
            self._start_head_timer()
        super().data_received(data)
        if self.cycle is not previous:
            self._cancel_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.config.head_seconds, self.transport.close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class BackgroundServer:
    """Serves an application in a thread of its own until it is closed."""

    def __init__(self, config: ServerConfig, host: str, port: int) -> None:
        """OSError if the address is taken."""
        self._socket = bound_socket(host, port)
        try:
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self.address = address_of(self._socket)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(JOIN_SECONDS)
        self._socket.close()

    def _serve(self) -> None:
        asyncio.run(self._server.serve([self._socket]))


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that owns the address but does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Asyncio sends small answers at once (TCP_NODELAY) only if the socket names its protocol.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def address_of(bound: socket.socket) -> str:
    """HOST:PORT, with brackets around an IPv6 host."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def headers_of(scope: Scope) -> dict[str, str]:
    """Headers of an ASGI request, with lower-case names."""
    headers: list[tuple[Any, Any]] = scope["headers"]
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether a page of another site sent the request."""
    return "origin" in headers or headers.get("sec-fetch-site") == "cross-site"


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine in a way that no other site can own."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def has_token(headers: Mapping[str, str], token: str) -> bool:
    """Whether the request carries `Authorization: Bearer TOKEN`, compared in constant time."""
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        sent.encode(errors="replace"), token.encode()
    )
