"""Where the two sides of a limiter wait for each other, for a finite time that is measured."""

import logging
import time
from collections.abc import Callable
from threading import Condition
from typing import Literal

from replay.limiter import Limiter

log = logging.getLogger(__name__)


class Gate:
    """A limiter that threads wait at. Every wait ends: with True, or with False after its timeout.

    What is allowed is counted at once: check a payload before asking for its insert.
    """

    def __init__(
        self,
        limiter: Limiter,
        *,
        without_actors: Literal["wait", "continue_offline"] = "wait",
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Actors count as gone when none has asked for an insert for `patience` seconds."""
        self._limiter, self._clock = limiter, clock
        self._continue, self._patience = without_actors == "continue_offline", patience
        self._changed = Condition()
        self._asked = clock()  # when an insert was last asked for
        self.offline = False  # whether the learner goes on without actors
        self.offline_samples = 0  # drawn meanwhile: they are not held against the actors
        self.insert_waited = 0.0  # seconds
        self.sample_waited = 0.0

    @property
    def limiter(self) -> Limiter:
        return self._limiter

    def insert(self, count: int, timeout: float = 1.0) -> bool:
        """Whether `count` transitions may be inserted."""
        with self._changed:
            start = self._asked = self._clock()
            if self.offline:
                self.offline = False
                log.info("event=actors-back offline_samples=%d", self.offline_samples)
            allowed = self._changed.wait_for(
                lambda: not self._limiter.samples_missing(count), timeout
            )
            self.insert_waited += self._clock() - start
            if allowed:
                self._limiter = self._limiter.inserted(count)
                self._changed.notify_all()
            return allowed

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
            return allowed or self._go_on_alone(end)

    def _alone(self, now: float) -> bool:
        return self._continue and now - self._asked >= self._patience

    def _go_on_alone(self, now: float) -> bool:
        if not self._alone(now):
            return False
        if not self.offline:
            self.offline = True
            log.warning("event=continue-offline silent_s=%.0f", now - self._asked)
        self.offline_samples += self._limiter.limits.batch
        return True
