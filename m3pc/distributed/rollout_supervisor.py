"""A rollout process as the driver sees it: given its order whenever it is found without."""

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from actors.reports import RolloutReport
from m3pc.distributed.supervisor import RayRestartedProcess, kill_process, reason_of

WORKING = ("running", "draining")


class SupervisedRolloutWorker(RayRestartedProcess):
    def __init__(self, slot: int, make: Callable[[], Any], order: Any, *, patience: float) -> None:
        """`make` gives the handle of a new RolloutActor, `order` is what it is told to do."""
        super().__init__(
            f"actor-{slot}",
            make,
            patience=patience,
            ask=lambda handle: handle.report.remote(self.heard),
        )
        self.slot, self._order = slot, order
        self.heard = -1  # number of the last finished episode that was told
        self._due: float | None = 0.0  # when the order is given; None: it was
        self._giving: Any = None
        self._draining: Any = None

    def poll(self, now: float) -> None:
        if self._giving is not None and not self._given(now):
            return
        super().poll(now)
        report: RolloutReport | None = self.report
        if self.state != "up" or report is None or self._draining is not None:
            return
        if report.state not in WORKING:
            self._lead(now, report)

    def _lead(self, now: float, report: RolloutReport) -> None:
        if self._due is None:  # it had the order: this is another process, or the work failed
            self.moved()
            self._ended(now, report.reason or "its process ended")
        elif now >= self._due:
            self._due, self.heard = None, -1
            self.report = self._pending = None  # what it said, it said before
            self._giving = self.handle.start.remote(self._order)

    def _ended(self, now: float, reason: str) -> None:
        self.reason, self._due = reason, self.restarts.ended(now)
        if self._due is None:
            self.end()

    def lost(self, now: float, reason: str) -> None:
        """Ray gave it up."""
        super().lost(now, reason)
        self._due, self._giving = 0.0, None

    def _given(self, now: float) -> bool:
        """Whether the order has arrived, or never will."""
        ready, _ = ray.wait([self._giving], timeout=0)
        if not ready:
            if now - self._answered > self._patience:
                self._giving = None
            return False
        giving, self._giving = self._giving, None
        try:
            ray.get(giving, timeout=1.0)
        except RayError as error:
            self._ended(now, reason_of(error))
            return self.state != "parked"
        return True

    def drain(self, seconds: float) -> None:
        """End in order: `drained` tells when."""
        if self._draining is None and self.handle is not None:
            self._draining = self.handle.drain.remote(seconds)

    @property
    def drained(self) -> bool:
        """Nothing is to be waited for: it ended, or it is dead, or it never was."""
        if self._draining is None:
            return self.handle is None
        return bool(ray.wait([self._draining], timeout=0)[0])

    @property
    def works(self) -> bool:
        """One that answers may still wait for its order."""
        report: RolloutReport | None = self.report
        return self.state == "up" and report is not None and report.state == "running"

    def leave(self) -> None:
        """For ever: killed from outside where it has not drained, for it may hear nobody."""
        if self.home is not None and not self.drained:
            kill_process(self.home)
        self.end()
