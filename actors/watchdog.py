"""Ends a rollout process whose environment hangs, after saving what it collected."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from m3pc.core.exit_codes import INTERNAL
from m3pc.core.watchdog import Watchdog

SAVE_SECONDS: Final = 2.0
GRACE: Final = 5.0  # seconds that the C timer fires after the Python thread's limit
MAX_POLL_SECONDS: Final = 1.0

log = logging.getLogger(__name__)


class EnvWatchdog(Watchdog):
    """A StepWatchdog. It times only calls between `arm` and `disarm`, so waiting is no hang."""

    def __init__(
        self,
        timeout: float,
        save: Callable[[int, float], object],
        *,
        grace: float = GRACE,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] | None = None,
    ) -> None:
        """One call may take `timeout` seconds. Then `save(slot, seconds)` is called once, in its
        own thread, and may take `seconds`."""
        self._timeout, self._save, self._clock = timeout, save, clock
        self._armed: tuple[int, float] | None = None  # slot, time of `arm`
        # Held while the process ends: a call that returns late then waits in `disarm`.
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
