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
from typing import Protocol

import numpy as np

from m3pc.telemetry.catalogue import (
    BATCH_ROWS,
    EFFECTIVE_CANDIDATES,
    OUT_OF_MEMORY,
    PLAN_SECONDS,
    PLANNER_BUSY,
    PLANNER_IDLE,
    QUEUE_ROWS,
    REQUESTS,
    UTILITY_STD,
)
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Decision, InputError, PlanRequest, Rejection, RejectReason
from planner.latency_model import DeadlineRequest, LatencyModel
from planner.requests import answer_in_chunks, count_fitting

log = logging.getLogger(__name__)

PlanReply = Decision | Rejection
OnScheduled = Callable[[PlanRequest], None]  # called just before the request is computed

IDLE_SECONDS = 1.0  # longest single wait on an empty queue
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.01, 5.0  # bounds of the retry-after hint
ROW_SECONDS_GAIN = 0.1  # weight of the last batch in the mean duration of a row
GROW_AFTER = 100  # batches that fit into memory before larger ones are tried again
STOP_SECONDS = 10.0


class PlanningEngine(Protocol):
    """Computes the requests of a batcher."""

    def check(self, request: PlanRequest) -> None:
        """Raise an InputError if the request can never be answered."""

    def compute(self, requests: Sequence[PlanRequest]) -> Sequence[Decision]:
        """One decision per checked request; MemoryError if the batch is too large."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuedRequest:
    """A request that waits or is computed. Times are on the batcher's clock."""

    request: PlanRequest
    rows: int
    arrived: float
    hard_deadline: float  # a request that still waits is rejected then
    soft_deadline: float | None = None  # a later reply is late, but still of use
    on_scheduled: OnScheduled | None = None
    reply: "Future[PlanReply]" = field(default_factory=Future)


class Batcher:
    """Accepts requests from any thread and computes them in one thread of its own.

    A request is checked once, when it is submitted. A batch starts once `max_rows` rows wait or the
    oldest request has waited `max_wait` seconds; a request with more rows is computed alone. At
    most `queue_rows` rows wait. With a latency model, requests with a soft deadline get fewer
    candidates when time is short.
    """

    def __init__(
        self,
        engine: PlanningEngine,
        *,
        max_rows: int,
        max_wait: float,
        queue_rows: int,
        recorder: Recorder,
        latency_model: LatencyModel | None = None,
        grow_after: int = GROW_AFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._latency_model = engine, latency_model
        self._max_rows, self._max_wait, self._queue_rows = max_rows, max_wait, queue_rows
        self._recorder, self._grow_after, self._clock = recorder, grow_after, clock
        self._changed = threading.Condition()
        self._waiting: deque[QueuedRequest] = deque()
        self._waiting_rows = 0
        self._computing: list[QueuedRequest] = []
        self._compute_began: float | None = None
        self._limit = max_rows  # rows of a batch that fit into memory
        self._batches_that_fit = 0  # count since the limit last changed
        self._row_seconds = 0.0  # mean duration of a row, for the retry-after hint alone
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(
        self,
        request: PlanRequest,
        hard_deadline: float,
        *,
        soft_deadline: float | None = None,
        on_scheduled: OnScheduled | None = None,
    ) -> "Future[PlanReply]":
        """Queue a request. A rejected one has its reply at once.

        hard_deadline  seconds from now after which the request is rejected if it still waits
        soft_deadline  seconds from now after which the reply is late; a latency model reduces the
                       candidates to meet it
        on_scheduled   called with the request as it is computed, after such a reduction
        """
        now = self._clock()
        queued = QueuedRequest(
            request=request,
            rows=len(request.window),
            arrived=now,
            hard_deadline=now + hard_deadline,
            soft_deadline=None if soft_deadline is None else now + soft_deadline,
            on_scheduled=on_scheduled,
        )
        rejection = self._check(queued)
        with self._changed:
            rejection = rejection or self._check_room(queued)
            if rejection is None:
                self._waiting.append(queued)
                self._count_waiting(queued.rows)
                self._changed.notify()
                return queued.reply
        self._resolve(queued, rejection)
        return queued.reply

    def swap(self, engine: PlanningEngine) -> None:
        """Use another engine from the next batch on. It must accept the same requests."""
        with self._changed:
            self._engine = engine

    def stuck_for(self) -> float:
        """Seconds since the current computation began; 0 if there is none."""
        began = self._compute_began
        return 0.0 if began is None else self._clock() - began

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def close(self, timeout: float = STOP_SECONDS) -> None:
        """Finish the current batch and reject the requests that still wait."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        self._reject_all()

    def __enter__(self) -> "Batcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, queued: QueuedRequest) -> Rejection | None:
        if not 1 <= queued.rows <= self._queue_rows:
            reason = f"a request has {queued.rows} rows; give 1 to {self._queue_rows}"
            return Rejection(why=RejectReason.BAD, reason=reason)
        try:
            self._engine.check(queued.request)
        except InputError as error:
            return Rejection(why=RejectReason.BAD, reason=str(error))
        return None

    def _check_room(self, queued: QueuedRequest) -> Rejection | None:
        if self._closing:
            return _CLOSED
        if self._waiting_rows + queued.rows <= self._queue_rows:
            return None
        estimate = self._row_seconds * self._waiting_rows
        wait = min(max(estimate, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        reason = f"{self._waiting_rows} of at most {self._queue_rows} rows wait already"
        return Rejection(why=RejectReason.RETRY_LATER, reason=reason, wait=wait)

    def _run(self) -> None:
        try:
            while self._gather():
                self._compute_batch(self._computing)
        finally:  # even if the thread dies, every caller gets a reply
            self._closing = True
            self._reject_all()

    def _gather(self) -> bool:
        """Fill the next batch; False once the batcher is closed."""
        with self._changed:
            while not self._closing:
                pause = self._seconds_until_due()
                if pause > 0:
                    self._sleep(pause)
                    continue
                self._reject_late()
                self._computing = self._take_batch()
                if self._computing:
                    return True
        return False

    def _seconds_until_due(self) -> float:
        if not self._waiting:
            return IDLE_SECONDS
        if self._waiting_rows >= self._limit:
            return 0.0
        return self._waiting[0].arrived + self._max_wait - self._clock()

    def _sleep(self, seconds: float) -> None:
        begin, idle = self._clock(), not self._waiting
        self._changed.wait(seconds)
        if idle:
            self._recorder.add(PLANNER_IDLE, self._clock() - begin)

    def _reject_late(self) -> None:
        now = self._clock()
        late = [queued for queued in self._waiting if now >= queued.hard_deadline]
        for queued in late:
            self._waiting.remove(queued)
            self._count_waiting(-queued.rows)
            reason = "its deadline passed before it was computed"
            self._resolve(queued, Rejection(why=RejectReason.LATE, reason=reason))

    def _take_batch(self) -> list[QueuedRequest]:
        count = count_fitting((queued.rows for queued in self._waiting), self._limit)
        taken = [self._waiting.popleft() for _ in range(count)]
        self._count_waiting(-sum(queued.rows for queued in taken))
        batch = [queued for queued in taken if queued.reply.set_running_or_notify_cancel()]
        for _ in range(len(taken) - len(batch)):  # their callers cancelled
            self._recorder.add(REQUESTS, label="late")
        return batch

    def _count_waiting(self, rows: int) -> None:
        self._waiting_rows += rows
        self._recorder.set(QUEUE_ROWS, self._waiting_rows)

    def _compute_batch(self, batch: Sequence[QueuedRequest]) -> None:
        begin, rows = self._clock(), sum(queued.rows for queued in batch)
        requests = self._schedule(batch, begin)
        replies = self._replies(self._engine, requests)
        seconds = self._clock() - begin
        if self._latency_model is not None:
            self._latency_model.observe(requests, seconds)
        gain = ROW_SECONDS_GAIN if self._row_seconds else 1.0
        self._row_seconds += gain * (seconds / rows - self._row_seconds)
        self._recorder.add(PLANNER_BUSY, seconds)
        self._recorder.observe(BATCH_ROWS, rows)
        for queued, reply in zip(batch, replies, strict=True):
            queue_seconds = begin - queued.arrived
            self._recorder.observe(PLAN_SECONDS, queue_seconds, "queue")
            self._recorder.observe(PLAN_SECONDS, seconds, "compute")
            self._recorder.observe(PLAN_SECONDS, queue_seconds + seconds, "total")
            self._resolve(queued, reply)
        self._record_plans([reply for reply in replies if isinstance(reply, Decision)])
        self._computing = []

    def _schedule(self, batch: Sequence[QueuedRequest], now: float) -> list[PlanRequest]:
        """The requests to compute: unchanged, or with as many candidates as time allows."""
        requests = [queued.request for queued in batch]
        if self._latency_model is not None:
            requests = self._latency_model.fit_to_deadlines(
                [_with_deadline(queued, now) for queued in batch]
            )
        for queued, request in zip(batch, requests, strict=True):
            if queued.on_scheduled is not None:
                queued.on_scheduled(request)
        return requests

    def _record_plans(self, decisions: Sequence[Decision]) -> None:
        planned = [d for d in decisions if np.isfinite(d.utility_std).all()]  # with candidates
        for decision in planned:
            self._recorder.observe(
                EFFECTIVE_CANDIDATES, float(decision.effective_candidates.mean())
            )
        if planned:
            utility_std = np.concatenate([decision.utility_std for decision in planned])
            self._recorder.set(UTILITY_STD, float(utility_std.mean()))

    def _replies(self, engine: PlanningEngine, requests: Sequence[PlanRequest]) -> list[PlanReply]:
        """One reply per request. If a batch fails, each of its requests is tried alone."""
        try:
            return [_reject_not_finite(decision) for decision in self._decide(engine, requests)]
        except Exception as error:
            log.warning("event=batch-failed requests=%d reason=%r", len(requests), str(error))
            if len(requests) == 1:
                return [_failure(error)]
        return [self._replies(engine, [request])[0] for request in requests]

    def _decide(self, engine: PlanningEngine, requests: Sequence[PlanRequest]) -> list[Decision]:
        """One decision per request, computed as one batch if that fits into memory."""
        rows = sum(len(request.window) for request in requests)
        max_rows = rows if self._limit == self._max_rows else self._limit
        self._compute_began = self._clock()
        try:
            if max_rows < rows:
                decisions = answer_in_chunks(engine.compute, requests, max_rows)
            else:
                decisions = list(engine.compute(requests))
            self._raise_limit()
        except MemoryError:
            self._recorder.add(OUT_OF_MEMORY)
            self._limit = math.ceil(min(max_rows, self._max_rows) / 2)
            self._batches_that_fit = 0
            log.warning("event=batch-halved rows=%d limit=%d", rows, self._limit)
            decisions = answer_in_chunks(engine.compute, requests, self._limit)
        finally:
            self._compute_began = None
        if len(decisions) != len(requests):
            raise RuntimeError(f"{len(decisions)} decisions for {len(requests)} requests")
        return decisions

    def _raise_limit(self) -> None:
        """After enough batches that fit, allow an eighth more rows, up to the configured number."""
        self._batches_that_fit += 1
        if self._limit < self._max_rows and self._batches_that_fit >= self._grow_after:
            self._limit = min(self._max_rows, self._limit + math.ceil(self._max_rows / 8))
            self._batches_that_fit = 0

    def _reject_all(self) -> None:
        with self._changed:
            unanswered = [*self._waiting, *self._computing]
            self._waiting.clear()
            self._count_waiting(-self._waiting_rows)
        for queued in unanswered:
            self._resolve(queued, _CLOSED)

    def _resolve(self, queued: QueuedRequest, reply: PlanReply) -> None:
        if queued.reply.done():
            return
        result = "ok" if isinstance(reply, Decision) else reply.why.value
        self._recorder.add(REQUESTS, label=result)
        with suppress(InvalidStateError):  # cancelled or rejected at this very moment
            queued.reply.set_result(reply)


_CLOSED = Rejection(why=RejectReason.FAILED, reason="this planner is closing; ask another one")


def _with_deadline(queued: QueuedRequest, now: float) -> DeadlineRequest:
    if queued.soft_deadline is None:
        return DeadlineRequest(request=queued.request)
    return DeadlineRequest(
        request=queued.request,
        seconds_left=queued.soft_deadline - now,
        seconds_at_arrival=queued.soft_deadline - queued.arrived,
    )


def _reject_not_finite(decision: Decision) -> PlanReply:
    """Reject actions that are not finite: finite inputs can overflow inside the network."""
    if np.isfinite(decision.actions).all():
        return decision
    reason = "its numbers are so large that no finite action follows; give smaller ones"
    return Rejection(why=RejectReason.BAD, reason=reason)


def _failure(error: Exception) -> Rejection:
    why = RejectReason.BAD if isinstance(error, InputError) else RejectReason.FAILED
    return Rejection(why=why, reason=f"{type(error).__name__}: {error}"[:500])
