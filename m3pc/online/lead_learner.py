"""Learners that share each batch: the lead learner decides, its followers do the same.

Only the lead learner asks how many updates are allowed, publishes and writes checkpoints. It sends
a command before each refresh or update of its trainer; followers only wait for commands. Commands
must not be further apart than the deadline of the group: a REFRESH is enough.
"""

import time
from enum import IntEnum

from learner.process_group import PeersLostError, ProcessGroup
from m3pc.online.run_folder import OnlineRun
from m3pc.online.trainer import Trainer
from m3pc.telemetry.recorder import Recorder

AGREE_SECONDS, PAUSE = 60.0, 0.2  # limit for agreeing on the episodes; pause between attempts


class LearnerCommand(IntEnum):
    END = 0
    REFRESH = 1
    UPDATE = 2


class LeadLearner:
    """Runs the trainer of rank 0 and commands the followers, if there are any."""

    def __init__(
        self,
        run: OnlineRun,
        *,
        group: ProcessGroup,
        recorder: Recorder,
        agree_seconds: float = AGREE_SECONDS,
    ) -> None:
        self._group, self._visible, self._agree_seconds = group, 0, agree_seconds
        self.trainer = Trainer(
            run, group=group, recorder=recorder, visible_episodes=lambda: self._visible
        )
        self.refresh()

    def refresh(self) -> None:
        """Let all learners see the same collected episodes. If retention or a withdrawal changes
        the store between their reads, all read it again."""
        end = time.monotonic() + self._agree_seconds
        while True:
            self._visible = self.trainer.count_collected()
            self._group.broadcast([LearnerCommand.REFRESH, self._visible])
            self.trainer.refresh()
            if self._group.all_equal(self.trainer.fingerprint()):
                return
            if time.monotonic() > end:
                raise PeersLostError(
                    f"for {self._agree_seconds:g} seconds the learners did not see the same "
                    "checkpoint and episodes; check whether all machines see "
                    f"{self.trainer.run.path}"
                )
            time.sleep(PAUSE)

    def update(self) -> None:
        """Do the next update, on all learners."""
        self._group.broadcast([LearnerCommand.UPDATE, 0])
        self.trainer.update()

    def end(self) -> None:
        """Let the followers return."""
        self._group.broadcast([LearnerCommand.END, 0])


class FollowerLearner:
    """Any other learner of the group."""

    def __init__(self, run: OnlineRun, group: ProcessGroup) -> None:
        self._group, self._visible = group, 0
        self.trainer = Trainer(run, group=group, visible_episodes=lambda: self._visible)

    def work(self) -> None:
        """Follow the lead learner's commands until it ends."""
        while True:
            command, visible = self._group.broadcast([LearnerCommand.END, 0])
            if command == LearnerCommand.END:
                return
            if command == LearnerCommand.UPDATE:
                self.trainer.update()
            else:
                self._visible = visible
                self.trainer.refresh()
                self._group.all_equal(self.trainer.fingerprint())
