"""Looks for bit rot: reads segments slowly, one after another, and quarantines changed ones."""

import threading

from replay.writing.group_commit import GroupCommitter
from replay.writing.writer import Writer

RATE = 20 << 20  # bytes a second
MIN_PAUSE = 1.0  # seconds between two segments
STOP_SECONDS = 30.0


class Scrubber:
    """Runs a thread beside a GroupCommitter; appends go on while it reads."""

    def __init__(
        self, committer: GroupCommitter, *, rate: int = RATE, min_pause: float = MIN_PAUSE
    ) -> None:
        self._committer, self._rate, self._min_pause = committer, rate, min_pause
        self._stop = threading.Event()
        self.checked = 0  # segments
        self.damaged = 0
        self._thread = threading.Thread(target=self._run, name="scrubber", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(STOP_SECONDS)

    def __enter__(self) -> "Scrubber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        last = -1
        while not self._stop.is_set():
            segments = self._committer.writer.index.segments
            pause = self._min_pause
            if segments:
                entry = next((s for s in segments if s.number > last), segments[0])
                last, pause = entry.number, max(pause, entry.bytes / self._rate)
                self._check(last)
            self._stop.wait(pause)

    def _check(self, number: int) -> None:
        if self._committer.writer.check_segment(number):
            self._committer.call(lambda writer: self._quarantine(writer, number))
        self.checked += 1

    def _quarantine(self, writer: Writer, number: int) -> None:
        """Check again between two groups, when nothing else touches the files."""
        damage = writer.check_segment(number)
        if damage:
            self.damaged += 1
            writer.quarantine(number, damage)
