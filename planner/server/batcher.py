"""Continuous batching: while one batch is computed, the next one gathers. Threads, no Ray.

A row is one environment of a request.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from m3pc.telemetry.catalogue import (
    BATCH_ROWS,
    EFFECTIVE,
    OUT_OF_MEMORY,
    PLAN_SECONDS,
    PLANNER_BUSY,
    PLANNER_IDLE,
    QUEUE_ROWS,
    REQUESTS,
    SPREAD,
)
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Decision, InputError, PlanRequest, Rejection, RejectReason
from planner.latency_model import DeadlineRequest, LatencyModel
from planner.requests import AnswerFn, fitting, in_pieces

log = logging.getLogger(__name__)

CheckFn = Callable[[PlanRequest], None]  # an InputError where an answer is impossible
PlanReply = Decision | Rejection
OnScheduled = Callable[[PlanRequest], None]  # how a request is computed, when it is

LONGEST_PAUSE = 1.0  # seconds between two looks at an empty queue
LEAST_WAIT, LONGEST_WAIT = 0.01, 5.0  # seconds that the refused are told to wait
NEWEST = 0.1  # weight of the last batch in the seconds that a row takes
GROW_AFTER = 100  # batches that fit, before larger ones are tried again
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuedRequest:
    ask: PlanRequest
    rows: int
    arrived: float
    deadline: float  # on the same clock
    soon: float | None = None  # by which an answer is wanted; later it still is one
    told: OnScheduled | None = None
    reply: "Future[PlanReply]" = field(default_factory=Future)


class Batcher:
    """Answers requests of any threads by one of its own.

    A batch starts with `rows` rows, or once its oldest request has waited `wait` seconds; a
    larger request goes alone. More than `queue` rows never wait. `answer` may tell by MemoryError
    that a batch is too large. With a `pace`, requests that are wanted soon get fewer candidates.
    """

    def __init__(
        self,
        answer: AnswerFn,
        check: CheckFn,
        *,
        rows: int,
        wait: float,
        queue: int,
        recorder: Recorder,
        pace: LatencyModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serving = answer, check
        self._timing = pace
        self._rows, self._wait, self._queue = rows, wait, queue
        self._recorder, self._clock = recorder, clock
        self._changed = threading.Condition()
        self._waiting: deque[QueuedRequest] = deque()
        self._waiting_rows = 0
        self._computing: list[QueuedRequest] = []
        self._began: float | None = None  # when what is computed now was begun
        self._limit, self._fitted = rows, 0  # rows that fit into memory; batches since it shrank
        self._pace = 0.0  # seconds that a row takes
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def submit(
        self,
        ask: PlanRequest,
        seconds: float,
        *,
        soon: float | None = None,
        told: OnScheduled | None = None,
    ) -> "Future[PlanReply]":
        """The reply, at once or when its batch was computed; `seconds` from now it is too late.

        soon  seconds from now after which it is late: with a pace, planning makes do with less
        told  is called with what is computed in the end, before it is
        """
        now = self._clock()
        waiting = QueuedRequest(
            ask=ask,
            rows=len(ask.window),
            arrived=now,
            deadline=now + seconds,
            soon=None if soon is None else now + soon,
            told=told,
        )
        refusal = self._unfit(waiting)
        with self._changed:
            refusal = refusal or self._no_place(waiting)
            if refusal is None:
                self._waiting.append(waiting)
                self._count(waiting.rows)
                self._changed.notify()
                return waiting.reply
        self._settle(waiting, refusal)
        return waiting.reply

    def swap(self, answer: AnswerFn, check: CheckFn) -> None:
        """Answer so from the next batch on."""
        with self._changed:
            self._serving = answer, check

    def stuck_for(self) -> float:
        """Seconds since what is being computed was begun; 0 between two batches."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def close(self, timeout: float = STOP_SECONDS) -> None:
        """Finish the batch that is computed, refuse whoever still waits."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        self._dismiss()

    def __enter__(self) -> "Batcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unfit(self, waiting: QueuedRequest) -> Rejection | None:
        if not 1 <= waiting.rows <= self._queue:
            reason = f"a request has {waiting.rows} rows; give 1 to {self._queue}"
            return Rejection(why=RejectReason.BAD, reason=reason)
        try:
            self._serving[1](waiting.ask)
        except InputError as error:
            return Rejection(why=RejectReason.BAD, reason=str(error))
        return None

    def _no_place(self, waiting: QueuedRequest) -> Rejection | None:
        if self._closing:
            return _CLOSED
        if self._waiting_rows + waiting.rows <= self._queue:
            return None
        wait = min(max(self._pace * self._waiting_rows, LEAST_WAIT), LONGEST_WAIT)
        reason = f"{self._waiting_rows} of at most {self._queue} rows wait already"
        return Rejection(why=RejectReason.RETRY_LATER, reason=reason, wait=wait)

    def _work(self) -> None:
        try:
            while self._gather():
                self._serve(self._computing)
        finally:  # whatever ended it: nobody waits for ever
            self._closing = True
            self._dismiss()

    def _gather(self) -> bool:
        """Fill the next batch; False at the end."""
        with self._changed:
            while not self._closing:
                pause = self._pause()
                if pause > 0:
                    self._rest(pause)
                    continue
                self._refuse_late()
                self._computing = self._taken()
                if self._computing:
                    return True
        return False

    def _pause(self) -> float:
        if not self._waiting:
            return LONGEST_PAUSE
        if self._waiting_rows >= self._limit:
            return 0.0
        return self._waiting[0].arrived + self._wait - self._clock()

    def _rest(self, seconds: float) -> None:
        begin, idle = self._clock(), not self._waiting
        self._changed.wait(seconds)
        if idle:
            self._recorder.add(PLANNER_IDLE, self._clock() - begin)

    def _refuse_late(self) -> None:
        now = self._clock()
        late = [each for each in self._waiting if now >= each.deadline]
        for each in late:
            self._waiting.remove(each)
            self._count(-each.rows)
            reason = "its deadline passed before it was computed"
            self._settle(each, Rejection(why=RejectReason.LATE, reason=reason))

    def _taken(self) -> list[QueuedRequest]:
        count = fitting((each.rows for each in self._waiting), self._limit)
        taken = [self._waiting.popleft() for _ in range(count)]
        self._count(-sum(each.rows for each in taken))
        wanted = [each for each in taken if each.reply.set_running_or_notify_cancel()]
        for _ in range(len(taken) - len(wanted)):  # their callers left
            self._recorder.add(REQUESTS, label="late")
        return wanted

    def _count(self, rows: int) -> None:
        self._waiting_rows += rows
        self._recorder.set(QUEUE_ROWS, self._waiting_rows)

    def _serve(self, group: Sequence[QueuedRequest]) -> None:
        begin, rows = self._clock(), sum(each.rows for each in group)
        asks = self._asks(group, begin)
        replies = self._replies(self._serving[0], asks)
        seconds = self._clock() - begin
        if self._timing is not None:
            self._timing.observe(asks, seconds)
        self._pace += (NEWEST if self._pace else 1.0) * (seconds / rows - self._pace)
        self._recorder.add(PLANNER_BUSY, seconds)
        self._recorder.observe(BATCH_ROWS, rows)
        for each, reply in zip(group, replies, strict=True):
            self._recorder.observe(PLAN_SECONDS, begin - each.arrived, "queue")
            self._recorder.observe(PLAN_SECONDS, seconds, "compute")
            self._recorder.observe(PLAN_SECONDS, begin - each.arrived + seconds, "total")
            self._settle(each, reply)
        self._record_plans([reply for reply in replies if isinstance(reply, Decision)])
        self._computing = []

    def _asks(self, group: Sequence[QueuedRequest], now: float) -> list[PlanRequest]:
        """What is computed: as it was asked, or what there is time for."""
        asks = [each.ask for each in group]
        if self._timing is not None:
            asks = self._timing.fitted([_due(each, now) for each in group])
        for each, ask in zip(group, asks, strict=True):
            if each.told is not None:
                each.told(ask)
        return asks

    def _record_plans(self, decisions: Sequence[Decision]) -> None:
        """Of those that were planned: the others have no candidates."""
        planned = [each for each in decisions if np.isfinite(each.utility_std).all()]
        for each in planned:
            self._recorder.observe(EFFECTIVE, float(each.effective_candidates.mean()))
        if planned:
            spread = np.concatenate([each.utility_std for each in planned])
            self._recorder.set(SPREAD, float(spread.mean()))

    def _replies(self, answer: AnswerFn, asks: Sequence[PlanRequest]) -> list[PlanReply]:
        """Where a batch fails, each of its requests is tried alone."""
        try:
            return [_sound(decision) for decision in self._computed(answer, asks)]
        except Exception as error:
            log.warning("event=batch-failed requests=%d reason=%r", len(asks), str(error))
            if len(asks) == 1:
                return [_failure(error)]
        return [self._replies(answer, [ask])[0] for ask in asks]

    def _computed(self, answer: AnswerFn, asks: Sequence[PlanRequest]) -> list[Decision]:
        """One decision a request, as one batch unless that does not fit into memory."""
        rows = sum(len(ask.window) for ask in asks)
        most = rows if self._limit == self._rows else self._limit
        self._began = self._clock()
        try:
            found = in_pieces(answer, asks, most) if most < rows else list(answer(asks))
            self._grow()
        except MemoryError:
            self._recorder.add(OUT_OF_MEMORY)
            self._limit, self._fitted = math.ceil(min(most, self._rows) / 2), 0
            log.warning("event=batch-halved rows=%d limit=%d", rows, self._limit)
            found = in_pieces(answer, asks, self._limit)
        finally:
            self._began = None
        if len(found) != len(asks):
            raise RuntimeError(f"{len(found)} decisions for {len(asks)} requests")
        return found

    def _grow(self) -> None:
        self._fitted += 1
        if self._limit < self._rows and self._fitted >= GROW_AFTER:
            self._limit = min(self._rows, self._limit + math.ceil(self._rows / 8))
            self._fitted = 0

    def _dismiss(self) -> None:
        with self._changed:
            left = [*self._waiting, *self._computing]
            self._waiting.clear()
            self._count(-self._waiting_rows)
        for each in left:
            self._settle(each, _CLOSED)

    def _settle(self, waiting: QueuedRequest, reply: PlanReply) -> None:
        if waiting.reply.done():
            return
        result = "ok" if isinstance(reply, Decision) else reply.why.value
        self._recorder.add(REQUESTS, label=result)
        with suppress(InvalidStateError):  # dismissed, or its caller left, in this very moment
            waiting.reply.set_result(reply)


_CLOSED = Rejection(why=RejectReason.FAILED, reason="this planner is closing; ask another one")


def _due(waiting: QueuedRequest, now: float) -> DeadlineRequest:
    if waiting.soon is None:
        return DeadlineRequest(ask=waiting.ask)
    left, span = waiting.soon - now, waiting.soon - waiting.arrived
    return DeadlineRequest(ask=waiting.ask, left=left, span=span)


def _sound(decision: Decision) -> PlanReply:
    if np.isfinite(decision.actions).all():
        return decision
    reason = "its numbers are so large that no finite action follows; give smaller ones"
    return Rejection(why=RejectReason.BAD, reason=reason)


def _failure(error: Exception) -> Rejection:
    why = RejectReason.BAD if isinstance(error, InputError) else RejectReason.FAILED
    return Rejection(why=why, reason=f"{type(error).__name__}: {error}"[:500])
