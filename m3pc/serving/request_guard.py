"""Checks a request before the application sees it: token, host, site, size, time.

A web page in a browser on this machine may send requests here. Pages of other sites are always
refused; where no token is required, requests to foreign host names are refused too.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m3pc.core.http_server import has_token, headers_of, is_cross_site, is_own_name
from m3pc.serving.problems import ProblemError

READ_SECONDS: Final = 10.0  # time limit for receiving a request's body
OPEN_PATHS: Final = ("/livez", "/readyz", "/openapi.json", "/docs", "/metrics")  # without the token
METRICS: Final = "/metrics"
ARRIVED: Final = "m3pc.arrived"  # ASGI scope key: time at which the request arrived, by `clock`

log = logging.getLogger(__name__)


class RequestGuard:
    """ASGI middleware around the application. Every failure inside becomes a problem document."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        metrics_token: str | None,
        max_body: int,
        clock: Callable[[], float],
        read_seconds: float = READ_SECONDS,
    ) -> None:
        """`max_body` is in bytes; `read_seconds` limits the time to receive a body."""
        self._app, self._max_body, self._clock = app, max_body, clock
        self._token, self._metrics_token = token, metrics_token
        self._read_seconds = read_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket, which is not supported
            await send({"type": "websocket.close", "code": 1008})
            return
        scope[ARRIVED] = self._clock()
        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] += [
                    (b"x-content-type-options", b"nosniff"),
                    (b"cache-control", b"no-store"),
                ]
            await send(message)

        try:
            self._check_sender(scope)
            body = await self._body(scope, receive)
            await self._app(scope, _once(body, receive), send_guarded)
        except ProblemError as error:
            await error.response()(scope, receive, send_guarded)
        except Exception:
            log.exception("event=request-failed path=%r", scope["path"][:200])
            if not started:
                failure = ProblemError(500, "the server failed; its log says why")
                await failure.response()(scope, receive, send_guarded)

    def _check_sender(self, scope: Scope) -> None:
        headers = headers_of(scope)
        if is_cross_site(headers):
            raise ProblemError(403, "this is not for pages of other sites; ask from a program")
        required = self._token
        if scope["path"] in OPEN_PATHS:
            required = self._metrics_token if scope["path"] == METRICS else None
        if required is None:
            if not is_own_name(headers.get("host", "")):
                raise ProblemError(
                    421, "ask by an IP address, localhost or this machine's name", where="Host"
                )
        elif not has_token(headers, required):
            sent = "another token was sent" if "authorization" in headers else "no token was sent"
            raise ProblemError(
                401,
                f"{sent}; send the server's as `Authorization: Bearer TOKEN`",
                where="Authorization",
                headers={"WWW-Authenticate": 'Bearer realm="m3pc"'},
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = headers_of(scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._read_seconds):
                return await self._read(receive)
        except TimeoutError:
            detail = (
                f"the message did not arrive within {self._read_seconds:g} seconds; send it again"
            )
            raise ProblemError(408, detail, headers={"Connection": "close"}) from None

    async def _read(self, receive: Receive) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ProblemError(400, "the message ended before it was complete; send it again")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._max_body:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> ProblemError:
        detail = f"the message has more than {self._max_body} bytes; no message needs as many"
        return ProblemError(413, detail, headers={"Connection": "close"})


def _once(body: bytes, receive: Receive) -> Receive:
    """A receive function that yields the body in one part, then whatever follows."""
    unread = [body]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again
