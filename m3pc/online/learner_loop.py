"""A learner as a process of a fleet: as many updates as what was collected owes, and no more."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

from learner.process_group import ProcessGroup
from learner.publish import Publisher
from m3pc.online.lead_learner import LeadLearner
from m3pc.online.recovery import WEIGHTS, weights_path
from m3pc.online.run_folder import OnlineRun
from m3pc.telemetry.catalogue import COORDINATOR_DOWN, LEARNER_WAIT
from m3pc.telemetry.recorder import Recorder, Snapshot
from m3pc.types import (
    Coordinator,
    CoordinatorUnavailableError,
    StoreUnavailableError,
    Version,
)

AT_ONCE = 16  # updates asked for together, on what was collected by then
PAUSE = 0.2  # seconds, after an answer that nothing may be done or that nobody gave
START_SECONDS = 60.0  # for the coordinator to give an epoch

log = logging.getLogger(__name__)


class UpdateBudget(Protocol):
    def may_update(self, epoch: int, done: int, total: int) -> int:
        """How many updates may have been done in all, up to `total`, after a short wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReport:
    updates: int
    epoch: int
    waiting: bool  # for what is collected
    idle: float  # seconds since it last did or asked for something
    error: str  # why it ended; "" while it has not
    snapshot: Snapshot


class LearnerLoop:
    """Owns the epoch that it takes at its start: a learner before it is fenced from then on."""

    def __init__(
        self,
        run: OnlineRun,
        store: UpdateBudget,
        coordinator: Coordinator,
        *,
        group: ProcessGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorder, self._clock, self._store = Recorder(), clock, store
        self._lead = LeadLearner(run, group=group or ProcessGroup(), recorder=self.recorder)
        self.trainer = self._lead.trainer
        self._online, self._waiting, self._beat = run.config.online, False, clock()
        self._publisher = Publisher(
            Path(run.path),
            coordinator,
            name=WEIGHTS,
            path=weights_path,
            epoch=_epoch(coordinator, self.recorder),
            keep=self._online.keep,
            recorder=self.recorder,
        )
        self._publish()  # so the disk knows the epoch too, whatever the coordinator forgets

    def work(self, stop: Event) -> None:
        """Until told to stop; then a last version and a checkpoint."""
        while not stop.is_set():
            allowed = self._allowed()
            if allowed <= self.trainer.updates:
                self._wait(stop)
                continue
            self._waiting = False
            self._lead.refresh()
            while self.trainer.updates < allowed and not stop.is_set():
                self._update()
        self._lead.end()
        self._publish()
        self.trainer.save()

    def report(self, error: str = "") -> LearnerReport:
        return LearnerReport(
            updates=self.trainer.updates,
            epoch=self._publisher.epoch,
            waiting=self._waiting,
            idle=self._clock() - self._beat,
            error=error,
            snapshot=self.recorder.snapshot(),
        )

    def _allowed(self) -> int:
        updates, start = self.trainer.updates, self._clock()
        self._beat = start
        try:
            allowed = self._store.may_update(self._publisher.epoch, updates, updates + AT_ONCE)
        except StoreUnavailableError as error:
            log.warning("event=store-unavailable reason=%s", error)
            allowed = 0
        self.recorder.add(LEARNER_WAIT, self._clock() - start, "limiter")
        return allowed

    def _wait(self, stop: Event) -> None:
        self._waiting = True
        self._publisher.offer()
        start = self._clock()
        stop.wait(PAUSE)
        self.recorder.add(LEARNER_WAIT, self._clock() - start, "limiter")
        self._lead.refresh()

    def _update(self) -> None:
        self._beat = self._clock()
        self._lead.update()
        if self.trainer.updates % self._online.publish_every == 0:
            self._publish()
        if self.trainer.updates % self._online.checkpoint_every == 0:
            self.trainer.save()

    def _publish(self) -> None:
        number, start = self.trainer.updates, self._clock()
        self.trainer.measure()
        version = Version(epoch=self._publisher.epoch, number=number)
        self._publisher.publish(self.trainer.weights(version.packed), number)
        self.recorder.add(LEARNER_WAIT, self._clock() - start, "disk")


def _epoch(coordinator: Coordinator, recorder: Recorder) -> int:
    """Without one nothing can be published, so it is waited for; then the process ends."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return coordinator.new_epoch(WEIGHTS)
        except CoordinatorUnavailableError:
            recorder.add(COORDINATOR_DOWN)
            if time.monotonic() > end:
                raise
            time.sleep(PAUSE)
