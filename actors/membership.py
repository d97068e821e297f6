"""Registers a rollout process with the coordinator, and sends its heartbeats."""

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Final

from m3pc.telemetry.catalogue import COORDINATOR_FAILURES
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Coordinator, CoordinatorUnavailableError

CLOSE_SECONDS: Final = 2.0
POINTER: Final = "weights"

log = logging.getLogger(__name__)


class Membership:
    """A thread that registers the slot, with retries, and then sends heartbeats.

    The process goes on while the coordinator fails: the store itself refuses the episodes of a
    process that has lost its slot.
    """

    def __init__(
        self,
        connect: Callable[[], Coordinator],
        slot: int,
        *,
        recorder: Recorder,
        on_lost: Callable[[], None],
        period: float,
    ) -> None:
        """`on_lost` is called once, if a newer incarnation has the slot. Heartbeats and attempts to
        register are `period` seconds apart."""
        self._connect, self._slot, self._period = connect, slot, period
        self._recorder, self._on_lost = recorder, on_lost
        self._stop, self._settled = threading.Event(), threading.Event()
        self._newest: int | None = None
        self.incarnation = -1  # -1 until the slot is registered
        self.failure = ""  # why registration failed for good, or empty
        self._thread = threading.Thread(target=self._work, name="membership", daemon=True)
        self._thread.start()

    def wait_registered(self, timeout: float) -> bool:
        """Whether the slot is registered; RuntimeError if registration failed for good."""
        self._settled.wait(timeout)
        if self.failure:
            raise RuntimeError(f"slot {self._slot} cannot be registered: {self.failure}")
        return self.incarnation >= 0

    def newest(self) -> int | None:
        """Number of updates in the newest published weights; None while unknown."""
        return self._newest

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            with closing(self._connect()) as coordinator:
                while not self._stop.is_set() and self._turn(coordinator):
                    self._stop.wait(self._period)
        except Exception as error:
            log.exception("event=membership-failed slot=%d", self._slot)
            self.failure = f"{type(error).__name__}: {error}"
            self._settled.set()

    def _turn(self, coordinator: Coordinator) -> bool:
        """One heartbeat; False once the slot is lost. Failures are retried at the next
        heartbeat, except that unknown failures before registration are raised."""
        kept = True
        try:
            kept = self._beat(coordinator)
        except CoordinatorUnavailableError as error:
            self._recorder.add(COORDINATOR_FAILURES)
            log.warning("event=coordinator-down slot=%d reason=%s", self._slot, error)
        except Exception:
            if self.incarnation < 0:
                raise
            self._recorder.add(COORDINATOR_FAILURES)
            log.exception("event=membership-failed slot=%d", self._slot)
        if self.incarnation >= 0:
            self._settled.set()
        if not kept:
            log.warning("event=slot-lost slot=%d incarnation=%d", self._slot, self.incarnation)
            self._on_lost()
        return kept

    def _beat(self, coordinator: Coordinator) -> bool:
        """Register or send a heartbeat, and read the newest version; False if the slot is lost."""
        if self.incarnation < 0:
            self.incarnation = coordinator.register(self._slot)
            log.info("event=registered slot=%d incarnation=%d", self._slot, self.incarnation)
        elif not coordinator.heartbeat(self._slot, self.incarnation):
            return False
        pointer = coordinator.read(POINTER)
        self._newest = pointer.version.number if pointer else None
        return True
