"""Who is let in, before anything of a request is looked at: token, host, site, size, time.

A web page in a browser on this machine may send requests here. It has no token, and without one
nobody is answered under a name that a stranger may own, nor for the page of another site.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m3pc.core.http_server import is_own_name
from m3pc.serving.problems import ProblemError

READ_SECONDS: Final = 10.0  # for a request's body
OPEN: Final = ("/livez", "/readyz", "/openapi.json", "/docs", "/metrics")  # without the token
METRICS: Final = "/metrics"
ARRIVED: Final = "m3pc.arrived"  # in a scope: when its request began, by the guard's clock

log = logging.getLogger(__name__)


class RequestGuard:
    """Around an application. Whatever goes wrong inside of it is a sentence outside."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        metrics_token: str | None,
        largest: int,
        clock: Callable[[], float],
    ) -> None:
        self._app, self._largest, self._clock = app, largest, clock
        self._token, self._metrics_token = token, metrics_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket; there are none
            await send({"type": "websocket.close", "code": 1008})
            return
        scope[ARRIVED] = self._clock()
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] += [
                    (b"x-content-type-options", b"nosniff"),
                    (b"cache-control", b"no-store"),
                ]
            await send(message)

        try:
            self._require_entry(scope)
            body = await self._body(scope, receive)
            await self._app(scope, _once(body, receive), answer)
        except ProblemError as error:
            await error.response()(scope, receive, answer)
        except Exception:
            log.exception("event=request-failed path=%r", scope["path"][:200])
            if not begun:
                failed = ProblemError(500, "the server failed; its log says how")
                await failed.response()(scope, receive, answer)

    def _require_entry(self, scope: Scope) -> None:
        headers = _headers(scope)
        if "origin" in headers or headers.get("sec-fetch-site") == "cross-site":
            raise ProblemError(403, "this is not for pages of other sites; ask from a program")
        wanted = self._token
        if scope["path"] in OPEN:
            wanted = self._metrics_token if scope["path"] == METRICS else None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if wanted is None:
            if not is_own_name(headers.get("host", "")):
                raise ProblemError(
                    421, "ask by an IP address, localhost or this machine's name", where="Host"
                )
        elif scheme.lower() != "bearer" or not hmac.compare_digest(
            given.encode(errors="replace"), wanted.encode()
        ):
            said = "another token was sent" if scheme else "no token was sent"
            raise ProblemError(
                401,
                f"{said}; send the server's as `Authorization: Bearer TOKEN`",
                where="Authorization",
                headers={"WWW-Authenticate": 'Bearer realm="m3pc"'},
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = _headers(scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._largest:
            raise self._too_large()
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await self._read(receive)
        except TimeoutError:
            detail = f"the message did not arrive within {READ_SECONDS:g} seconds; send it again"
            raise ProblemError(408, detail, headers={"Connection": "close"}) from None

    async def _read(self, receive: Receive) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ProblemError(400, "the message ended before it was whole; send it again")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._largest:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> ProblemError:
        detail = f"the message has more than {self._largest} bytes; no message needs as many"
        return ProblemError(413, detail, headers={"Connection": "close"})


def _headers(scope: Scope) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _once(body: bytes, receive: Receive) -> Receive:
    """The body that was read, as one piece; then whatever comes."""
    left = [body]

    async def again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again
