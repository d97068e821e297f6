"""Makes collecting and learning wait for each other, so that their ratio stays in its limits."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Condition
from typing import Literal

from m3pc.types import FencedError
from replay.server.sample_ratio import RateLimits, SampleInsertRatio

log = logging.getLogger(__name__)


class RateLimiter:
    """Threads wait here until the ratio allows their request, or until their timeout.

    An append reserves its inserts first, and settles them when it is known whether they are stored:
    an episode counts once, however often it was sent. A learner asks with totals, not increments,
    so a repeated request changes nothing.
    """

    def __init__(
        self,
        ratio: SampleInsertRatio,
        *,
        without_actors: Literal["wait", "continue_offline"] = "wait",
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Actors count as gone when none has asked for an insert for `patience` seconds."""
        self._ratio, self._clock = ratio, clock
        self._continue, self._patience = without_actors == "continue_offline", patience
        self._changed = Condition()
        self._epoch: int | None = None  # epoch of the current learner
        self._last_request = clock()  # time of the last request for an insert
        self.reserved = 0  # inserts whose outcome is not known yet
        self.waiting = 0  # appends that wait for room
        self.offline = False  # whether the learner goes on without actors
        self.offline_samples = 0  # granted without actors; the ratio ignores them

    @property
    def ratio(self) -> SampleInsertRatio:
        return self._ratio

    def set_limits(self, limits: RateLimits) -> None:
        with self._changed:
            self._ratio = replace(self._ratio, limits=limits)
            self._changed.notify_all()

    # Collecting

    def reserve(self, count: int, timeout: float = 1.0) -> bool:
        """Wait for room. If True, `count` inserts may be stored, and the caller must settle them.

        There must be room for the largest insert, also if `count` is smaller: otherwise short
        episodes would take all the room while a long one waits.
        """
        with self._changed:
            self._last_request = self._clock()
            if self.offline:
                self.offline = False
                log.info("event=actors-back offline_samples=%d", self.offline_samples)
            self.waiting += 1
            allowed = self._changed.wait_for(lambda: self._has_room(count), timeout)
            self.waiting -= 1
            if allowed:
                self.reserved += count
            return allowed

    def settle(self, count: int, inserts: int) -> None:
        """Release `count` reserved inserts; the store now counts `inserts` in all."""
        with self._changed:
            self.reserved -= count
            # Concurrent calls may arrive in the wrong order; the store's count never falls.
            inserts = max(inserts, self._ratio.inserts)
            self._ratio = replace(self._ratio, inserts=inserts)
            self._changed.notify_all()

    def _has_room(self, count: int) -> bool:
        ahead = replace(self._ratio, inserts=self._ratio.inserts + self.reserved)
        return not ahead.samples_missing(max(count, ahead.limits.max_insert))

    # Learning

    def grant(self, epoch: int, done: int, total: int, timeout: float = 1.0) -> int:
        """Return how many samples, up to `total`, a learner that has drawn `done` may draw in all.

        Waits, up to `timeout`, for more than was granted before. FencedError: a newer epoch has
        begun.
        """
        with self._changed:
            start = self._clock()
            self._begin(epoch, done)
            self._changed.wait_for(
                lambda: (
                    epoch != self._epoch
                    or total <= self.granted
                    or self._reachable(total) > self._ratio.samples
                ),
                0 if self._actors_gone(start) else timeout,
            )
            end = self._clock()
            self._refuse_older(epoch)
            samples = self._reachable(total)
            if samples > self._ratio.samples:
                self._ratio = replace(self._ratio, samples=samples)
                self._changed.notify_all()
            if total > self.granted and self._actors_gone(end):
                if not self.offline:
                    self.offline = True
                    log.warning("event=continue-offline silent_s=%.0f", end - self._last_request)
                self.offline_samples += total - self.granted
            return min(total, self.granted)

    @property
    def granted(self) -> int:
        return self._ratio.samples + self.offline_samples

    def _reachable(self, total: int) -> int:
        return min(total - self.offline_samples, self._ratio.max_samples)

    def _refuse_older(self, epoch: int) -> None:
        if self._epoch is not None and epoch < self._epoch:
            raise FencedError(
                f"a learner of epoch {epoch} asks, but one of epoch {self._epoch} has begun; stop"
            )

    def _begin(self, epoch: int, done: int) -> None:
        """A learner that starts may have lost updates in a crash: those are granted again."""
        self._refuse_older(epoch)
        if epoch == self._epoch:
            return
        offline = min(self.offline_samples, done)
        if self._epoch is None and self._continue:
            # Samples granted without actors before this process started.
            offline = max(done - self._ratio.max_samples, 0)
        self._epoch, self.offline_samples = epoch, offline
        samples = min(self._ratio.samples, done - offline)
        self._ratio = replace(self._ratio, samples=samples)
        self._changed.notify_all()

    def _actors_gone(self, now: float) -> bool:
        return self._continue and now - self._last_request >= self._patience
