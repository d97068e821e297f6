"""Appends from many threads: those that wait together are synced together."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, Full, Queue
from typing import NamedTuple

from m3pc.telemetry.catalogue import COMMIT_SECONDS
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Ack, AckStatus, AppendKey
from replay.writing.writer import AppendRequest, Writer

MOST_WAITING = 1024  # requests; a producer has one at a time
MOST_TOGETHER = 256
STOP_SECONDS = 30.0

log = logging.getLogger(__name__)


class PendingCommit(NamedTuple):
    request: AppendRequest
    answer: "Future[Ack]"
    settle: Callable[[], None]


class GroupCommitter:
    """An EpisodeSink that any thread may call. It owns the writer until it is closed.

    While one group is being synced the next one gathers: nobody waits for company, and the more
    producers there are, the more share a sync.
    """

    def __init__(
        self, writer: Writer, *, deadline: float = 10.0, recorder: Recorder | None = None
    ) -> None:
        self.writer, self._deadline = writer, deadline
        self._recorder = recorder or Recorder()
        self._queue: Queue[PendingCommit | None] = Queue(MOST_WAITING)
        self._own = threading.Lock()  # of the writer
        self._thread = threading.Thread(target=self._work, name="appender", daemon=True)
        self._thread.start()

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        """Checked here, in the caller's thread; then it waits for its group, not for ever."""
        return self.commit(self.writer.request(key, payload))

    def commit(self, request: AppendRequest, settle: Callable[[], None] = lambda: None) -> Ack:
        """`settle` is called once, when it is known whether the request is stored: before it is
        answered, or after its caller was told that nobody knows."""
        waiting = PendingCommit(request, Future(), settle)
        begin = time.monotonic()
        try:
            self._queue.put(waiting, timeout=self._deadline)
        except Full:
            settle()
            return self._nobody_knows()
        try:
            return waiting.answer.result(self._deadline - (time.monotonic() - begin))
        except TimeoutError:
            return self._nobody_knows()

    def _nobody_knows(self) -> Ack:
        return Ack(
            status=AckStatus.RETRY_LATER,
            expected=0,
            durability=self.writer.options.durability,
            reason=f"no answer within {self._deadline:g} seconds; it may be stored or not",
        )

    def call(self, action: Callable[[Writer], None]) -> None:
        """Do something else with the writer, between two groups."""
        with self._own:
            action(self.writer)

    def close(self) -> None:
        """Answer whoever waits, then end in order."""
        self._queue.put(None, timeout=STOP_SECONDS)
        self._thread.join(STOP_SECONDS)
        with self._own:
            self.writer.close()

    def __enter__(self) -> "GroupCommitter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while not self._serve():
            pass

    def _serve(self) -> bool:
        """One group, which is let go before the next is waited for; whether it was the last."""
        group, ended = self._gather()
        if group:
            self._commit(group)
        return ended

    def _gather(self) -> tuple[list[PendingCommit], bool]:
        """Whoever waits now, one at least; and whether the end was asked for."""
        group: list[PendingCommit] = []
        found = self._queue.get()
        while found is not None:
            group.append(found)
            if len(group) == MOST_TOGETHER:
                return group, False
            try:
                found = self._queue.get_nowait()
            except Empty:
                return group, False
        return group, True

    def _commit(self, group: list[PendingCommit]) -> None:
        begin = time.monotonic()
        try:
            with self._own:
                acks = self.writer.commit([waiting.request for waiting in group])
        except Exception as error:
            for waiting in group:
                waiting.settle()
                waiting.answer.set_exception(error)
            if not isinstance(error, OSError):
                log.exception("event=appender-failed")
        else:
            self._recorder.observe(COMMIT_SECONDS, time.monotonic() - begin)
            for waiting, ack in zip(group, acks, strict=True):
                waiting.settle()
                waiting.answer.set_result(ack)
