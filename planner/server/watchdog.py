"""Ends a process whose planner hangs: whoever started it starts another one."""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

EXIT_CODE = 70  # EX_SOFTWARE
LIMIT = 30.0  # seconds
STDERR = 2  # the descriptor, whatever sys.stderr is by now


class BatchWatchdog:
    """Looks at how long the current batch takes, from a thread of its own.

    Code that never lets go of the interpreter stops that thread too; then a timer outside of
    Python, which each look winds up again, ends the process with code 1.
    """

    def __init__(
        self,
        stuck_for: Callable[[], float],
        limit: float = LIMIT,
        *,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._stuck_for, self._limit, self._end = stuck_for, limit, end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self._limit)

    def _work(self) -> None:
        while not self._stop.wait(self._limit / 10):
            faulthandler.dump_traceback_later(2 * self._limit, exit=True, file=STDERR)
            seconds = self._stuck_for()
            if seconds > self._limit:
                log.error("event=planner-stuck seconds=%.1f limit_s=%g", seconds, self._limit)
                faulthandler.dump_traceback(file=STDERR)
                self._end(EXIT_CODE)
                break
        faulthandler.cancel_dump_traceback_later()
