"""What the status file and the metrics of a run are made from: the run at one moment."""

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
    state: ProcessState | RolloutState  # of a rollout worker that is up: its own state
    is_working: bool
    pid: int | None
    node: str | None
    restarts: int
    reason: str  # of its last end
    env_steps: float | None = None  # of a rollout worker that is up

    @property
    def part(self) -> str:
        """Its kind: store, learner, planner, evaluator or actor."""
        return self.name.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The whole run."""

    config: Config
    phase: Phase
    snapshot: Snapshot  # of the metrics of all processes together
    steps_per_second: float
    stored: StoreTotals | None  # None before the store's first report
    learner: LearnerStatus | None  # None while there is no report of it
    owed: int  # updates for all that is stored
    processes: Sequence[ProcessView]  # all but the actors
    actors: Mapping[int, ProcessView]  # by slot
    finished: Sequence[FinishedEpisode]  # the most recent ones
    evaluations: Sequence[Mapping[str, Any]]  # rows of the run's log

    @property
    def steps(self) -> int:
        return self.stored.steps if self.stored else 0

    @property
    def complete_episodes(self) -> list[FinishedEpisode]:
        return [episode for episode in self.finished if episode.outcome != "aborted"]
