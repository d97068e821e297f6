"""The run at one moment: the source of its status file and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actors.reports import FinishedEpisode, RolloutState
from m3pc.config.schema import Config
from m3pc.online.learner_loop import LearnerStatus
from m3pc.telemetry.recorder import Snapshot
from replay.server.service import StoreTotals

Phase = Literal["collecting", "draining", "learning", "saving", "evaluating", "ending", "ended"]
ProcessState = Literal["waiting", "starting", "up", "parked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One supervised process."""

    name: str
    state: ProcessState | RolloutState  # a rollout worker that is up reports a RolloutState
    is_working: bool
    pid: int | None
    node: str | None
    restarts: int
    reason: str  # why it last ended
    env_steps: float | None = None  # None unless it is a rollout worker that is up

    @property
    def part(self) -> str:
        """The kind of process: store, learner, planner, evaluator or actor."""
        return self.name.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    config: Config
    phase: Phase
    snapshot: Snapshot  # merged metrics of all processes
    steps_per_second: float
    stored: StoreTotals | None  # None before the store's first report
    learner: LearnerStatus | None  # None while the learner has not reported
    owed: int  # updates that the stored data demands
    processes: Sequence[ProcessView]  # all but the actors
    actors: Mapping[int, ProcessView]  # by slot
    finished: Sequence[FinishedEpisode]  # the most recent ones
    evaluations: Sequence[Mapping[str, Any]]  # rows in the run's log

    @property
    def steps(self) -> int:
        return self.stored.steps if self.stored else 0

    @property
    def complete_episodes(self) -> list[FinishedEpisode]:
        return [episode for episode in self.finished if episode.outcome != "aborted"]
