"""A connection that says nothing, or too little, is closed: its place is wanted by others."""

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS: Final = 10.0  # for the head of a request


class ConnectionTimeouts(H11Protocol):
    """From a connection's first moment, and from the first byte of each later request, its head
    has so many seconds to arrive, however it drips. Between two requests uvicorn's own time for
    silence holds; the time of a body is the guard's."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._timer is None and (not before or before.response_complete):
            self._begin()
        super().data_received(data)
        if self.cycle is not before:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._cut)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        self._timer = None
        self.transport.close()
