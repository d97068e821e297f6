"""Several learners as one: what the first does, its mates do with it.

The first alone asks how much may be learnt, publishes and writes checkpoints. Before each thing
that it does with its trainer it tells the mates, who wait for nothing else. So it has to do
something within the time that a group waits; looking at the store again is enough.
"""

import time
from enum import IntEnum

from learner.process_group import PeersLostError, ProcessGroup
from m3pc.online.run_folder import OnlineRun
from m3pc.online.trainer import Trainer
from m3pc.telemetry.recorder import Recorder

AGREE_SECONDS, PAUSE = 60.0, 0.2  # for all to see the same episodes; between two trials


class LearnerCommand(IntEnum):
    END = 0
    REFRESH = 1
    UPDATE = 2


class LeadLearner:
    """The first learner's trainer. Without mates, a trainer and no more."""

    def __init__(self, run: OnlineRun, *, group: ProcessGroup, recorder: Recorder) -> None:
        self._group, self._visible = group, 0
        self.trainer = Trainer(run, group=group, recorder=recorder, visible=lambda: self._visible)
        self.refresh()

    def refresh(self) -> None:
        """All see what was collected by now. Retention and withdrawals may come between two looks:
        then all look again."""
        end = time.monotonic() + AGREE_SECONDS
        while True:
            self._visible = self.trainer.collected()
            self._group.broadcast([LearnerCommand.REFRESH, self._visible])
            self.trainer.refresh()
            if self._group.all_equal(self.trainer.seen()):
                return
            if time.monotonic() > end:
                raise PeersLostError(
                    f"for {AGREE_SECONDS:g} seconds the learners did not see the same checkpoint "
                    f"and episodes; look whether all machines see {self.trainer.run.path}"
                )
            time.sleep(PAUSE)

    def update(self) -> None:
        self._group.broadcast([LearnerCommand.UPDATE, 0])
        self.trainer.update()

    def end(self) -> None:
        """The mates are free to go."""
        self._group.broadcast([LearnerCommand.END, 0])


class FollowerLearner:
    """Any other learner."""

    def __init__(self, run: OnlineRun, group: ProcessGroup) -> None:
        self._group, self._visible = group, 0
        self.trainer = Trainer(run, group=group, visible=lambda: self._visible)

    def work(self) -> None:
        """Until the first learner ends."""
        while True:
            order, visible = self._group.broadcast([LearnerCommand.END, 0])
            if order == LearnerCommand.END:
                return
            if order == LearnerCommand.UPDATE:
                self.trainer.update()
            else:
                self._visible = visible
                self.trainer.refresh()
                self._group.all_equal(self.trainer.seen())
