"""Where the two sides of a limiter wait for each other, for a finite time that is measured."""

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
    """A limiter that threads wait at. Every wait ends: allowed, or not after its timeout.

    Who appends reserves first, and settles when it is known what the store holds: inserts are what
    the store says, however often an episode was sent and whatever became of it. A learner says how
    far it is and wants to be, not how much it wants: asking again changes nothing.
    """

    def __init__(
        self,
        limiter: SampleInsertRatio,
        *,
        without_actors: Literal["wait", "continue_offline"] = "wait",
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Actors count as gone when none has asked for an insert for `patience` seconds."""
        self._limiter, self._clock = limiter, clock
        self._continue, self._patience = without_actors == "continue_offline", patience
        self._changed = Condition()
        self._reserved = 0  # on its way to the disk
        self._epoch: int | None = None  # of the learner that is believed
        self._asked = clock()  # when an insert was last asked for
        self.waiting = 0  # appends that have no place yet
        self.offline = False  # whether the learner goes on without actors
        self.offline_samples = 0  # drawn meanwhile: they are not held against the actors
        self.insert_waited = 0.0  # seconds
        self.sample_waited = 0.0

    @property
    def limiter(self) -> SampleInsertRatio:
        return self._limiter

    def change(self, limits: RateLimits) -> None:
        with self._changed:
            self._limiter = replace(self._limiter, limits=limits)
            self._changed.notify_all()

    # Collecting

    def insert(self, count: int, timeout: float = 1.0) -> bool:
        """Whether `count` may be inserted; they are counted at once."""
        with self._changed:
            allowed = self.reserve(count, timeout)
            if allowed:
                self.settle(count, self._limiter.inserts + count)
            return allowed

    def reserve(self, count: int, timeout: float = 1.0) -> bool:
        """Whether `count` may be on their way to the store; if so, settle them.

        Whatever the count, there must be room for the largest: else short episodes would take all
        the room that is made while a long one waits.
        """
        with self._changed:
            start = self._asked = self._clock()
            if self.offline:
                self.offline = False
                log.info("event=actors-back offline_samples=%d", self.offline_samples)
            self.waiting += 1
            allowed = self._changed.wait_for(lambda: self._has_room(count), timeout)
            self.waiting -= 1
            self.insert_waited += self._clock() - start
            if allowed:
                self._reserved += count
            return allowed

    def settle(self, count: int, inserts: int) -> None:
        """What was reserved is stored or not: `inserts` are in the store, all in all."""
        with self._changed:
            self._reserved -= count
            # Two that settle at once may come in the wrong order; what is stored stays counted.
            inserts = max(inserts, self._limiter.inserts)
            self._limiter = replace(self._limiter, inserts=inserts)
            self._changed.notify_all()

    def _has_room(self, count: int) -> bool:
        ahead = replace(self._limiter, inserts=self._limiter.inserts + self._reserved)
        return not ahead.samples_missing(max(count, ahead.limits.max_insert))

    # Learning

    def sample(self, timeout: float = 1.0) -> bool:
        """Whether a batch may be drawn."""
        with self._changed:
            start = self._clock()
            allowed = self._changed.wait_for(
                lambda: not self._limiter.inserts_missing(), 0 if self._alone(start) else timeout
            )
            end = self._clock()
            self.sample_waited += end - start
            if allowed:
                self._limiter = self._limiter.sampled()
                self._changed.notify_all()
            return allowed or self._go_on_alone(end, self._limiter.limits.batch)

    def grant(self, epoch: int, done: int, total: int, timeout: float = 1.0) -> int:
        """How many samples a learner that has drawn `done` may have drawn in all, of the `total`
        that it wants to have.

        It waits until this is more than was ever granted. FencedError: a newer epoch has begun.
        """
        with self._changed:
            start = self._clock()
            self._begin(epoch, done)
            self._changed.wait_for(
                lambda: (
                    epoch != self._epoch
                    or total <= self.granted
                    or self._reachable(total) > self._limiter.samples
                ),
                0 if self._alone(start) else timeout,
            )
            end = self._clock()
            self.sample_waited += end - start
            self._refuse_older(epoch)
            self._draw(self._reachable(total))
            if total > self.granted:
                self._go_on_alone(end, total - self.granted)
            return min(total, self.granted)

    @property
    def granted(self) -> int:
        return self._limiter.samples + self.offline_samples

    def _reachable(self, total: int) -> int:
        return min(total - self.offline_samples, self._limiter.most_samples)

    def _draw(self, samples: int) -> None:
        if samples > self._limiter.samples:
            self._limiter = replace(self._limiter, samples=samples)
            self._changed.notify_all()

    def _refuse_older(self, epoch: int) -> None:
        if self._epoch is not None and epoch < self._epoch:
            raise FencedError(
                f"a learner of epoch {epoch} asks, but one of epoch {self._epoch} has begun; stop"
            )

    def _begin(self, epoch: int, done: int) -> None:
        """A learner that starts knows best how far it is: what it lost it will draw again."""
        self._refuse_older(epoch)
        if epoch == self._epoch:
            return
        offline = min(self.offline_samples, done)
        if self._epoch is None and self._continue:
            # Whoever granted it before this gate was made knew that the actors were gone.
            offline = max(done - self._limiter.most_samples, 0)
        self._epoch, self.offline_samples = epoch, offline
        samples = min(self._limiter.samples, done - offline)
        self._limiter = replace(self._limiter, samples=samples)
        self._changed.notify_all()

    def _alone(self, now: float) -> bool:
        return self._continue and now - self._asked >= self._patience

    def _go_on_alone(self, now: float, count: int) -> bool:
        if not self._alone(now):
            return False
        if not self.offline:
            self.offline = True
            log.warning("event=continue-offline silent_s=%.0f", now - self._asked)
        self.offline_samples += count
        return True
