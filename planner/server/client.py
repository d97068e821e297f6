"""A client of planner servers, for processes without torch. Its pickle holds names, no handles."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from m3pc.core.backoff import Backoff
from m3pc.types import (
    Decision,
    InputError,
    PlannerGoneError,
    PlanRequest,
    Rejection,
    RejectReason,
    Window,
)
from planner.server.wire import decision_from_bytes, request_to_bytes

log = logging.getLogger(__name__)

BACKOFF = Backoff(first=0.05, longest=5.0)  # pause after all planners have been tried
GRACE = 1.0  # seconds after the deadline in which a planner may still reply that it is late
SLICE = 0.25  # seconds between two calls of `stop`


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    name: str  # the planner's name
    sent_at: float
    reply: Any  # an ObjectRef, or a Rejection if the request could not be sent


class PlannerClient:
    """A Planner that sends its requests to planner actors of equal configuration."""

    def __init__(
        self,
        names: Sequence[str],
        namespace: str,
        *,
        window: int,
        horizon: int,
        deadline: float,
        slot: int = 0,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`window` and `horizon` are those of the planners' configuration.

        names     the actors' names
        deadline  seconds for one attempt
        slot      number of this client; selects the actor of the first attempt
        patience  seconds after which `decide` raises a PlannerGoneError
        """
        assert names, "no planner to ask"
        self.window, self.horizon = window, horizon
        self._names, self._namespace, self._slot = tuple(names), namespace, slot
        self._deadline, self._patience = deadline, patience
        self._clock, self._sleep = clock, sleep
        self._rng = random.Random(slot)
        self._actors: dict[str, Any] = {}  # handles of this process

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_actors": {}}

    def ask(self, request: PlanRequest) -> "InFlightRequest":
        """Send a request and return at once."""
        return InFlightRequest(self, request)

    def decide(self, window: Window, *, explore: bool = False) -> Decision:
        return self.ask(PlanRequest(window=window, explore=explore)).result(self._patience)

    def _send(self, request: bytes, attempt: int) -> SentRequest:
        name, now = self._names[(self._slot + attempt) % len(self._names)], self._clock()
        try:
            if name not in self._actors:
                self._actors[name] = ray.get_actor(name, namespace=self._namespace)
            reply = self._actors[name].plan.remote(request, self._deadline)
        except (ValueError, RayError) as error:  # no such actor, or too many calls wait for it
            return SentRequest(name=name, sent_at=now, reply=self._forget(name, error))
        return SentRequest(name=name, sent_at=now, reply=reply)

    def _receive(
        self, sent: SentRequest, until: float, stop: Callable[[], bool]
    ) -> Decision | Rejection:
        """Wait for the reply; LATE after the attempt's deadline or `until`, or once `stop()`."""
        if isinstance(sent.reply, Rejection):
            return sent.reply
        until = min(until, sent.sent_at + self._deadline + GRACE)
        try:
            while True:
                left = max(until - self._clock(), 0.0)
                with suppress(GetTimeoutError):
                    reply = ray.get(sent.reply, timeout=min(left, SLICE))
                    return reply if isinstance(reply, Rejection) else decision_from_bytes(reply)
                if left == 0 or stop():
                    reason = f"{sent.name} has not answered"
                    return Rejection(why=RejectReason.LATE, reason=reason)
        except RayError as error:
            return self._forget(sent.name, error)

    def _forget(self, name: str, error: Exception) -> Rejection:
        """Drop the handle: a new actor may have the name when the next attempt looks it up."""
        self._actors.pop(name, None)
        reason = f"{name}: {type(error).__name__}: {str(error)[:200]}"
        log.info("event=planner-lost reason=%r", reason)
        return Rejection(why=RejectReason.FAILED, reason=reason)

    def _back_off(
        self, attempt: int, min_pause: float, until: float, stop: Callable[[], bool]
    ) -> None:
        """Pause if all planners have been tried."""
        rounds, tried = divmod(attempt, len(self._names))
        if tried:
            return
        pause = BACKOFF.jittered(rounds, self._rng, at_least=0.5)
        end = self._clock() + min_pause + pause
        while (left := min(end, until) - self._clock()) > 0 and not stop():
            self._sleep(min(left, SLICE))


class InFlightRequest:
    """A request that was sent. Sending it again is safe: planners keep no state."""

    def __init__(self, client: PlannerClient, request: PlanRequest) -> None:
        self._client, self._request = client, request_to_bytes(request)
        self.retries = 0
        self._sent = client._send(self._request, 0)

    def result(self, patience: float, stop: Callable[[], bool] = _never) -> Decision:
        """Retry until there is a decision; PlannerGoneError after `patience` seconds, or if
        `stop()` is true."""
        client, until = self._client, self._client._clock() + patience
        while True:
            reply = client._receive(self._sent, until, stop)
            if isinstance(reply, Decision):
                return reply
            if reply.why == RejectReason.BAD:
                raise InputError(f"the planner refused a request: {reply.reason}")
            self._retry(reply, until, stop)

    def _retry(self, reply: Rejection, until: float, stop: Callable[[], bool]) -> None:
        client = self._client
        self.retries += 1
        client._back_off(self.retries, reply.wait, until, stop)
        if stop() or client._clock() >= until:
            raise PlannerGoneError(
                f"no decision after {self.retries} tries, the last: {reply.why.value}, "
                f"{reply.reason}; look at the log of the planner"
            )
        self._sent = client._send(self._request, self.retries)
