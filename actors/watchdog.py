"""Ends a rollout process whose environment hangs, after saving what it collected."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from m3pc.core.exit_codes import INTERNAL
from m3pc.core.watchdog import Watchdog

SAVE_SECONDS: Final = 2.0
GRACE: Final = 5.0  # seconds that the timer in C waits longer than the Python thread
MAX_POLL_SECONDS: Final = 1.0

log = logging.getLogger(__name__)


class EnvWatchdog(Watchdog):
    """A StepWatchdog. Times only the calls between `arm` and `disarm`; waiting is no hang."""

    def __init__(
        self,
        timeout: float,
        save: Callable[[int, float], object],
        *,
        grace: float = GRACE,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] | None = None,
    ) -> None:
        """`timeout`: seconds that one call may take. `save(slot, seconds)` is called once, in a
        thread of its own, and may take so many seconds."""
        self._timeout, self._save, self._clock = timeout, save, clock
        self._armed: tuple[int, float] | None = None  # slot, since when
        # Held while the process ends, so a call that returns after all stays in `disarm`.
        self._arming = threading.Lock()
        super().__init__(
            self._elapsed,
            timeout,
            on_hang=self._save_and_log,
            poll_seconds=min(MAX_POLL_SECONDS, timeout / 4),
            deadlock_seconds=timeout + grace,
            lock=self._arming,
            end=end,
        )

    def arm(self, slot: int) -> None:
        with self._arming:
            self._armed = (slot, self._clock())

    def disarm(self) -> None:
        with self._arming:
            self._armed = None

    def _elapsed(self) -> float:
        return self._clock() - self._armed[1] if self._armed else 0.0

    def _save_and_log(self, seconds: float) -> None:
        assert self._armed is not None
        slot = self._armed[0]
        log.critical("event=env-hung env=%d seconds=%g exit=%d", slot, self._timeout, INTERNAL)
        saving = threading.Thread(
            target=self._save, args=(slot, SAVE_SECONDS), name="save", daemon=True
        )
        saving.start()
        saving.join(SAVE_SECONDS)
