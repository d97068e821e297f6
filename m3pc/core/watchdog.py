"""Ends a process whose code hangs, since no thread of Python can stop another.

Two timers watch. A Python thread polls how long the current call has taken; over the limit it
writes every thread's traceback, lets `on_hang` save what can be saved, and exits with 70. A timer
in C (`faulthandler`) covers code that never releases the interpreter's lock: each poll restarts
it, so it fires, and exits with 1, only when the polls themselves have stopped.
"""

import faulthandler
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from m3pc.core.exit_codes import INTERNAL

STDERR: Final = 2  # the descriptor, whatever sys.stderr has become


class Watchdog:
    """Exits the process when one call takes longer than `limit` seconds."""

    def __init__(
        self,
        busy_for: Callable[[], float],
        limit: float,
        *,
        on_hang: Callable[[float], object],
        poll_seconds: float,
        deadlock_seconds: float,
        lock: AbstractContextManager[object] | None = None,
        end: Callable[[int], object] | None = None,
    ) -> None:
        """`busy_for()` is how long the current call has taken in seconds, 0.0 between calls.

        `lock` is held from the check to the end of the process, so a call that returns late
        cannot slip in between.
        """
        self._busy_for, self._limit = busy_for, limit
        self._on_hang, self._end = on_hang, end or os._exit
        self._poll_seconds, self._deadlock_seconds = poll_seconds, deadlock_seconds
        self._lock = lock or nullcontext()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)

    def start(self) -> None:
        self._restart_timer()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._poll_seconds)
        faulthandler.cancel_dump_traceback_later()

    def _work(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            self._restart_timer()
            with self._lock:
                seconds = self._busy_for()
                if seconds > self._limit:
                    faulthandler.dump_traceback(file=STDERR)
                    self._on_hang(seconds)
                    self._end(INTERNAL)
                    return

    def _restart_timer(self) -> None:
        faulthandler.dump_traceback_later(self._deadlock_seconds, exit=True, file=STDERR)
