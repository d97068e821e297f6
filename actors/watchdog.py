"""Ends the process when foreign code does not come back: nothing else can stop it.

Two threads watch. One is Python's: it sees a call that takes too long, saves what can be saved and
exits with 70. The other is C's: the first winds it up again and again, so it goes off (and exits
with 1) only when no Python runs any more, as in a call that keeps the interpreter's lock.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

HUNG: Final = 70  # exit code
SAVE_SECONDS: Final = 2.0
GRACE: Final = 5.0  # seconds that the second thread waits longer than the first
LONGEST_LOOK: Final = 1.0  # seconds between two looks

log = logging.getLogger(__name__)


class ProcessWatchdog:
    """A Watch. Only calls between `arm` and `disarm` are timed: waiting for others is no hang."""

    def __init__(
        self,
        timeout: float,
        save: Callable[[int, float], object],
        *,
        grace: float = GRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`save(slot, seconds)` is called once, in a thread of its own, and may take so long."""
        self._timeout, self._save, self._grace, self._clock = timeout, save, grace, clock
        self._armed: tuple[int, float] | None = None  # slot, since when
        # Held while the process ends: a call that comes back after all stays in `disarm`.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)

    def start(self) -> None:
        self._wind_up()
        self._thread.start()

    def arm(self, slot: int) -> None:
        with self._lock:
            self._armed = (slot, self._clock())

    def disarm(self) -> None:
        with self._lock:
            self._armed = None

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(LONGEST_LOOK)
        faulthandler.cancel_dump_traceback_later()

    def _work(self) -> None:
        while not self._stop.wait(min(LONGEST_LOOK, self._timeout / 4)):
            self._wind_up()
            with self._lock:
                if self._armed and self._clock() - self._armed[1] > self._timeout:
                    self._end(self._armed[0])
                    return

    def _wind_up(self) -> None:
        seconds = self._timeout + self._grace
        faulthandler.dump_traceback_later(seconds, exit=True, file=_stderr())

    def _end(self, slot: int) -> None:
        log.critical("event=env-hung env=%d seconds=%g exit=%d", slot, self._timeout, HUNG)
        faulthandler.dump_traceback(_stderr())
        saving = threading.Thread(
            target=self._save, args=(slot, SAVE_SECONDS), name="save", daemon=True
        )
        saving.start()
        saving.join(SAVE_SECONDS)
        os._exit(HUNG)


def _stderr() -> TextIO:
    """The real one: what stands for it may have no file behind it."""
    assert sys.__stderr__ is not None
    return sys.__stderr__
