"""A planner that lives elsewhere, for processes without torch. It carries names, no handles."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from m3pc.types import (
    Decision,
    InputError,
    PlannerGoneError,
    PlanRequest,
    Rejection,
    RejectReason,
    Window,
)
from planner.server.wire import ask_to_bytes, decision_from_bytes

log = logging.getLogger(__name__)

LEAST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds before asking again, doubled each time
GRACE = 1.0  # seconds beyond its deadline in which a planner may still say that it is late
SLICE = 0.25  # seconds between two looks at `stop`


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    name: str  # of the planner that was asked
    at: float
    reply: Any  # an ObjectRef, or a Refusal where nobody could be asked


class PlannerClient:
    """A Planner. `names` are of planners that answer alike; `slot` tells with which to begin."""

    def __init__(
        self,
        names: Sequence[str],
        namespace: str,
        *,
        deadline: float,
        slot: int = 0,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert names, "no planner to ask"
        self._names, self._namespace, self._slot = tuple(names), namespace, slot
        self._deadline, self._patience = deadline, patience
        self._clock, self._sleep = clock, sleep
        self._rng = random.Random(slot)
        self._actors: dict[str, Any] = {}  # handles of this process

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_actors": {}}

    def ask(self, ask: PlanRequest) -> "InFlightRequest":
        """Send it, and wait for nothing."""
        return InFlightRequest(self, ask)

    def decide(self, window: Window, *, explore: bool = False) -> Decision:
        return self.ask(PlanRequest(window=window, explore=explore)).result(self._patience)

    def _send(self, request: bytes, turn: int) -> SentRequest:
        name, now = self._names[(self._slot + turn) % len(self._names)], self._clock()
        try:
            if name not in self._actors:
                self._actors[name] = ray.get_actor(name, namespace=self._namespace)
            reply = self._actors[name].plan.remote(request, self._deadline)
        except (ValueError, RayError) as error:  # no such actor, or too many calls wait for it
            return SentRequest(name=name, at=now, reply=self._lost(name, error))
        return SentRequest(name=name, at=now, reply=reply)

    def _receive(
        self, sent: SentRequest, until: float, stop: Callable[[], bool]
    ) -> Decision | Rejection:
        """What came, until its deadline, until then, or until `stop`."""
        if isinstance(sent.reply, Rejection):
            return sent.reply
        until = min(until, sent.at + self._deadline + GRACE)
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
            return self._lost(sent.name, error)

    def _lost(self, name: str, error: Exception) -> Rejection:
        """Look it up again next time: another may have its name by then."""
        self._actors.pop(name, None)
        reason = f"{name}: {type(error).__name__}: {str(error)[:200]}"
        log.info("event=planner-lost reason=%r", reason)
        return Rejection(why=RejectReason.FAILED, reason=reason)

    def _rest(self, turn: int, least: float, until: float, stop: Callable[[], bool]) -> None:
        """Nothing before every planner was asked; then longer each time, never all alike."""
        rounds, rest = divmod(turn, len(self._names))
        if rest:
            return
        pause = min(LEAST_PAUSE * 2.0 ** min(rounds - 1, 20), LONGEST_PAUSE)
        end = self._clock() + least + pause * self._rng.uniform(0.5, 1.0)
        while (left := min(end, until) - self._clock()) > 0 and not stop():
            self._sleep(min(left, SLICE))


class InFlightRequest:
    """A request on its way. Asking again is safe: a planner remembers nothing."""

    def __init__(self, client: PlannerClient, ask: PlanRequest) -> None:
        self._client, self._request = client, ask_to_bytes(ask)
        self.retries = 0
        self._sent = client._send(self._request, 0)

    def result(self, patience: float, stop: Callable[[], bool] = _never) -> Decision:
        """The decision, asked for again and again; PlannerGoneError after `patience` seconds, or
        once `stop` says so."""
        client, until = self._client, self._client._clock() + patience
        while True:
            reply = client._receive(self._sent, until, stop)
            if isinstance(reply, Decision):
                return reply
            if reply.why == RejectReason.BAD:
                raise InputError(f"the planner refused a request: {reply.reason}")
            self._again(reply, until, stop)

    def _again(self, reply: Rejection, until: float, stop: Callable[[], bool]) -> None:
        client = self._client
        self.retries += 1
        client._rest(self.retries, reply.wait, until, stop)
        if stop() or client._clock() >= until:
            raise PlannerGoneError(
                f"no decision after {self.retries} tries, the last: {reply.why.value}, "
                f"{reply.reason}; look at the log of the planner"
            )
        self._sent = client._send(self._request, self.retries)
