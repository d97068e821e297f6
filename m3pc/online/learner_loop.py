"""The learner process of a run: as many updates as the collected steps allow, and no more."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

from learner.process_group import ProcessGroup
from learner.publish import Publisher
from m3pc.online.lead_learner import AGREE_SECONDS, LeadLearner
from m3pc.online.recovery import WEIGHTS, weights_path
from m3pc.online.run_folder import OnlineRun
from m3pc.telemetry.catalogue import COORDINATOR_FAILURES, LEARNER_WAIT
from m3pc.telemetry.process_report import ProcessReport
from m3pc.telemetry.recorder import Recorder
from m3pc.types import (
    Coordinator,
    CoordinatorUnavailableError,
    StoreUnavailableError,
)

UPDATES_PER_PERMIT = 16  # updates requested from the store at once
PAUSE = 0.2  # seconds between requests, while no update is allowed
START_SECONDS = 60.0  # longest wait until the coordinator assigns an epoch

log = logging.getLogger(__name__)


class UpdateBudget(Protocol):
    def may_update(self, epoch: int, done: int, total: int) -> int:
        """The number of updates allowed since the run began, at most `total`. The call may wait a
        moment for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    updates: int
    epoch: int
    waiting: bool  # True: no update is allowed before more episodes arrive
    idle_seconds: float  # since the last update or request began
    error: str  # why the work ended; "" while it goes on


class LearnerLoop:
    """Takes a new epoch at its start, which fences every earlier learner of the run."""

    def __init__(
        self,
        run: OnlineRun,
        store: UpdateBudget,
        coordinator: Coordinator,
        *,
        group: ProcessGroup | None = None,
        agree_seconds: float = AGREE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorder, self._clock, self._store = Recorder(), clock, store
        self._lead = LeadLearner(
            run,
            group=group or ProcessGroup(),
            recorder=self.recorder,
            agree_seconds=agree_seconds,
        )
        self.trainer = self._lead.trainer
        self._online, self._waiting, self._last_active = run.config.online, False, clock()
        self.publisher = Publisher(
            Path(run.path),
            coordinator,
            name=WEIGHTS,
            path=weights_path,
            epoch=_new_epoch(coordinator, self.recorder),
            keep=self._online.keep,
            recorder=self.recorder,
        )
        self._publish()  # puts the epoch on disk too, in case the coordinator loses it

    def work(self, stop: Event) -> None:
        """Learn until `stop` is set; then publish a last version and write a checkpoint."""
        while not stop.is_set():
            # The store allows updates in proportion to the steps that it holds.
            allowed = self._allowed_updates()
            if allowed <= self.trainer.updates:
                self._wait(stop)
                continue
            self._waiting = False
            self._lead.refresh()  # all learners see the same newly collected episodes
            while self.trainer.updates < allowed and not stop.is_set():
                self._last_active = self._clock()
                self._lead.update()  # sample, update critic and model
                if self.trainer.updates % self._online.publish_every == 0:
                    self._publish()
                if self.trainer.updates % self._online.checkpoint_every == 0:
                    self.trainer.save()
        self._lead.end()
        self._publish()
        self.trainer.save()

    def report(self, error: str = "") -> ProcessReport[LearnerStatus]:
        status = LearnerStatus(
            updates=self.trainer.updates,
            epoch=self.publisher.epoch,
            waiting=self._waiting,
            idle_seconds=self._clock() - self._last_active,
            error=error,
        )
        return ProcessReport(pid=os.getpid(), snapshot=self.recorder.snapshot(), detail=status)

    def _allowed_updates(self) -> int:
        updates, start = self.trainer.updates, self._clock()
        self._last_active = start
        try:
            allowed = self._store.may_update(
                self.publisher.epoch, updates, updates + UPDATES_PER_PERMIT
            )
        except StoreUnavailableError as error:
            log.warning("event=store-unavailable reason=%s", error)
            allowed = 0
        self.recorder.add(LEARNER_WAIT, self._clock() - start, "limiter")
        return allowed

    def _wait(self, stop: Event) -> None:
        self._waiting = True
        self.publisher.publish_pointer()  # if the coordinator did not answer before
        start = self._clock()
        stop.wait(PAUSE)
        self.recorder.add(LEARNER_WAIT, self._clock() - start, "limiter")
        self._lead.refresh()

    def _publish(self) -> None:
        start = self._clock()
        self.trainer.record_values()
        self.publisher.publish(self.trainer.weights(self.publisher.epoch))
        self.recorder.add(LEARNER_WAIT, self._clock() - start, "disk")


def _new_epoch(coordinator: Coordinator, recorder: Recorder) -> int:
    """Wait for the coordinator, since nothing can be published without an epoch."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return coordinator.new_epoch(WEIGHTS)
        except CoordinatorUnavailableError:
            recorder.add(COORDINATOR_FAILURES)
            if time.monotonic() > end:
                raise
            time.sleep(PAUSE)
