"""Looks for rot: reads one segment after the other, slowly, and sets aside what has changed."""

import logging
import threading

from replay.writing.group_commit import GroupCommitter
from replay.writing.writer import Writer

RATE = 20 << 20  # bytes a second
SHORTEST = 1.0  # seconds between two segments
STOP_SECONDS = 30.0

log = logging.getLogger(__name__)


class Scrubber:
    """A thread beside an Appender; appends go on while it reads."""

    def __init__(
        self, appender: GroupCommitter, *, rate: int = RATE, shortest: float = SHORTEST
    ) -> None:
        self._appender, self._rate, self._shortest = appender, rate, shortest
        self._stop = threading.Event()
        self.checked = 0  # segments
        self.damaged = 0
        self._thread = threading.Thread(target=self._work, name="scrubber", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(STOP_SECONDS)

    def __enter__(self) -> "Scrubber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        last = -1
        while not self._stop.is_set():
            segments = self._appender.writer.listing.segments
            later = [listed for listed in segments if listed.number > last]
            pause = self._shortest
            if segments:
                listed = (later or list(segments))[0]
                last, pause = listed.number, max(pause, listed.bytes / self._rate)
                self._check(last)
            self._stop.wait(pause)

    def _check(self, number: int) -> None:
        if self._appender.writer.damage(number):
            self._appender.call(lambda writer: self._set_aside(writer, number))
        self.checked += 1

    def _set_aside(self, writer: Writer, number: int) -> None:
        """Asked again: between two groups nothing else touches the files."""
        what = writer.damage(number)
        if what:
            self.damaged += 1
            writer.quarantine(number, what)
