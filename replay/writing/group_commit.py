"""Commits appends of many threads: those that wait at the same time share one sync."""

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

MAX_WAITING = 1024  # requests; a producer has one at a time
MAX_GROUP = 256
STOP_SECONDS = 30.0

log = logging.getLogger(__name__)


class PendingCommit(NamedTuple):
    request: AppendRequest
    answer: "Future[Ack]"
    settle: Callable[[], None]


class GroupCommitter:
    """An EpisodeSink that any thread may call. It owns the writer until it is closed.

    While one group is being synced the next one gathers. No request waits for a group to fill, and
    the more producers there are, the more of them share a sync.
    """

    def __init__(
        self, writer: Writer, *, deadline: float = 10.0, recorder: Recorder | None = None
    ) -> None:
        """`deadline`: seconds after which a caller gets RETRY_LATER instead of the reply."""
        self.writer, self.deadline = writer, deadline
        self._recorder = recorder or Recorder()
        self._queue: Queue[PendingCommit | None] = Queue(MAX_WAITING)
        self._writer_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="appender", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that are in no group yet."""
        return self._queue.qsize()

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        """Decode in the caller's thread, then wait for the commit, up to the deadline."""
        return self.commit(self.writer.request(key, payload))

    def commit(self, request: AppendRequest, settle: Callable[[], None] = lambda: None) -> Ack:
        """`settle` is called exactly once, when the outcome is known: usually before the reply,
        but later than it if the deadline caused a RETRY_LATER."""
        waiting = PendingCommit(request, Future(), settle)
        begin = time.monotonic()
        try:
            self._queue.put(waiting, timeout=self.deadline)
        except Full:
            settle()
            return self._undecided()
        try:
            return waiting.answer.result(self.deadline - (time.monotonic() - begin))
        except TimeoutError:
            return self._undecided()

    def _undecided(self) -> Ack:
        return Ack(
            status=AckStatus.RETRY_LATER,
            expected=0,
            durability=self.writer.options.durability,
            reason=f"no answer within {self.deadline:g} seconds; it may be stored or not",
        )

    def call(self, action: Callable[[Writer], None]) -> None:
        """Run `action` on the writer between two groups."""
        with self._writer_lock:
            action(self.writer)

    def close(self) -> None:
        """Reply to all requests that wait, then close the writer."""
        self._queue.put(None, timeout=STOP_SECONDS)
        self._thread.join(STOP_SECONDS)
        with self._writer_lock:
            self.writer.close()

    def __enter__(self) -> "GroupCommitter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while self._commit_group():
            pass

    def _commit_group(self) -> bool:
        """Commit one group; False after the last. Returning frees the group's episodes before the
        wait for the next group."""
        group, goes_on = self._gather()
        if group:
            self._commit_and_reply(group)
        return goes_on

    def _gather(self) -> tuple[list[PendingCommit], bool]:
        """Wait for a request and take all that are queued; False once `close` was called."""
        group: list[PendingCommit] = []
        request = self._queue.get()
        while request is not None:
            group.append(request)
            if len(group) == MAX_GROUP:
                return group, True
            try:
                request = self._queue.get_nowait()
            except Empty:
                return group, True
        return group, False

    def _commit_and_reply(self, group: list[PendingCommit]) -> None:
        begin = time.monotonic()
        try:
            with self._writer_lock:
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
