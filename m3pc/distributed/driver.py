"""The one process that drives an online run on Ray, from its start to its end.

    collecting ─> draining ─> learning ─> saving ─> evaluating ─> ending
                      ^                                              ^
      stop, SIGTERM ──┴──────────────────────────────────────────────┘

Draining: actors store their collected steps. Learning: the learner does the updates that are still
owed. Saving: it publishes the last version. A run that is asked to stop goes from draining to
ending at once; `m3pc resume` continues it.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from m3pc.config.schema import FleetConfig
from m3pc.core.exit_codes import (
    DIVERGED,
    INTERNAL,
    IO_FAILED,
    OUT_OF_MEMORY,
    PARKED,
    TERMINATED,
)
from m3pc.core.signals import handle_signals
from m3pc.distributed.autoscaler import ActorBounds, Autoscaler
from m3pc.distributed.endpoints import RunEndpoints
from m3pc.distributed.evaluation_scheduler import EvaluationScheduler
from m3pc.distributed.fleet import ProcessFleet
from m3pc.distributed.metrics_endpoint import PublishMetrics
from m3pc.distributed.run_metrics import gauges, missing
from m3pc.distributed.run_view import Phase, RunView
from m3pc.distributed.status import RateMeter, describe, log_line
from m3pc.online.learner_loop import LearnerStatus
from m3pc.online.run_control import (
    DesiredState,
    read_desired_state,
    request,
    write_status,
)
from m3pc.online.run_folder import OnlineRun
from m3pc.telemetry.recorder import merge
from m3pc.tracking.run_log import RunLog
from m3pc.tracking.trackers import Tracker
from m3pc.types import Coordinator, DivergedError, InputError
from replay.server.schedule import schedule_of

PAUSE = 0.2  # seconds between two polls of all processes
STATUS_EVERY, LOG_EVERY = 0.5, 10.0  # seconds
DRAIN_SECONDS, END_SECONDS = 10.0, 30.0
LEARNER_IDLE_SECONDS = 600.0  # a learner that is idle for longer counts as hung
NO_LIMIT = 10**9  # steps
# Exit codes by the error that ended the learner. After any other error the learner is restarted.
FATAL_ERRORS = {
    DivergedError.__name__: DIVERGED,
    "MemoryError": OUT_OF_MEMORY,
    "OutOfMemoryError": OUT_OF_MEMORY,
}

ShowStatus = Callable[[Mapping[str, Any]], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a driver's part of a run ended."""

    code: int  # exit code
    reason: str
    steps: int


class Driver:
    """Each `turn` polls all processes and moves the run through its phases. Only ending blocks."""

    def __init__(
        self,
        run: OnlineRun,
        endpoints: RunEndpoints,
        show: ShowStatus,
        *,
        metrics: PublishMetrics = lambda snapshot, missing: None,
        tracker: Tracker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self._show, self._metrics, self._clock = run, show, metrics, clock
        self._tracker = tracker
        self._coordinator: Coordinator = endpoints.connect()
        self.fleet = ProcessFleet(run, endpoints)
        self.phase: Phase = "collecting"
        self._stop_requests = self._code = 0
        self._saving: Any = None  # the learner's reply to `stop`
        self._reason = ""
        self._phase_began = clock()
        self._status_written = self._logged = -1e9
        self._wanted_actors = run.config.fleet.actors
        self._autoscaler: Autoscaler | None = None
        self._rate = RateMeter()
        self._evaluations = EvaluationScheduler(run, self.fleet.evaluator, self._coordinator)
        request(run.path, stop=False)

    def drive(self) -> RunOutcome:
        """Take turns until the run has ended."""
        runlog = RunLog(self.run.path, done=10**12, unit="step", vital=False, tracker=self._tracker)
        with handle_signals(self._on_signal), runlog:
            try:
                while self.phase != "ended":
                    self.turn(self._clock(), runlog)
                    time.sleep(PAUSE)
            finally:
                self._log(runlog)
                self._publish_status(self._clock(), force=True)
                self.fleet.end()
                self._coordinator.close()
        return RunOutcome(code=self._code, reason=self._reason, steps=self.steps)

    @property
    def steps(self) -> int:
        return self.fleet.stored.steps if self.fleet.stored else 0

    @property
    def owed(self) -> int:
        """Updates that the schedule demands for the data in the store."""
        stored = self.fleet.stored
        if stored is None:
            return 0
        schedule = schedule_of(self.run.config.online, self.run.info.max_episode_steps)
        return schedule.owed(stored.steps, stored.episodes)

    def turn(self, now: float, runlog: RunLog) -> None:
        """Poll all processes once, act on the phase, publish status and metrics."""
        self._apply_requests(now)
        self.fleet.poll(now)
        self._check_processes(now)
        match self.phase:
            case "collecting":
                self._collect(now)
            case "draining":
                self._drain(now)
            case "learning":
                self._learn()
            case "saving":
                self._save()
            case "evaluating":
                self._evaluate(now)
            case "ending":
                self._end()
        if self.phase in ("collecting", "evaluating"):
            last = self.phase == "evaluating"
            self._evaluations.poll(now, self.steps, runlog, last=last)
        self._publish_status(now)
        if now - self._logged >= LOG_EVERY:
            self._logged = now
            self._log(runlog)

    # Requests from outside

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_requests += 1
        if self._stop_requests > 1:
            os._exit(TERMINATED)

    def _apply_requests(self, now: float) -> None:
        try:
            desired = read_desired_state(self.run.path)
        except InputError as error:  # the run goes on as it is
            log.warning("event=wanted-unreadable reason=%s", error)
            return
        if desired.stop and not self._stop_requests:
            self._stop_requests = 1
        if self.phase == "collecting":
            self._scale(desired, now)

    def _scale(self, desired: DesiredState, now: float) -> None:
        """Set the number of actors: as requested, or by autoscaling between the bounds."""
        bounds = _bounds(desired, self.run.config.fleet)
        if bounds is None:
            self._autoscaler = None
            if desired.actors is not None:
                self._wanted_actors = desired.actors
        else:
            if self._autoscaler is None or self._autoscaler.bounds != bounds:
                self._autoscaler = Autoscaler(bounds)
            before = self._wanted_actors
            self._wanted_actors = self._autoscaler.decide(
                now, self.fleet.snapshot(), actors=before, running=self.fleet.running_actors
            )
            if self._wanted_actors != before:
                self.fleet.count_scaling(before, self._wanted_actors)
                log.info("event=autoscaled from=%d to=%d", before, self._wanted_actors)
        self.fleet.scale(self._wanted_actors, now)

    # Whether the run can go on

    def _check_processes(self, now: float) -> None:
        if self.fleet.is_parked and self.phase == "collecting":
            reasons = sorted({actor.reason for actor in self.fleet.actors.values()})
            self._give_up(PARKED, f"every actor ended too often: {'; '.join(reasons)[:500]}")
        for process in self.fleet.core[:-1]:  # all but the evaluator, which is not vital
            if process.state == "parked" and self.phase not in ("ending", "ended"):
                code = IO_FAILED if process is self.fleet.store else INTERNAL
                self._give_up(code, f"{process.name} ended too often: {process.reason[:500]}")
        status = self.fleet.learner_status
        if status is not None:
            self._check_learner(status, now)

    def _check_learner(self, status: LearnerStatus, now: float) -> None:
        idle = status.idle_seconds
        if status.error and self.phase not in ("ending", "ended"):
            code = FATAL_ERRORS.get(status.error.partition(":")[0])
            if code is not None:
                self._give_up(code, f"the learner ended by {status.error}")
            else:
                self.fleet.learner.lost(now, status.error)
        elif idle > LEARNER_IDLE_SECONDS and self.phase in ("collecting", "learning"):
            self.fleet.learner.lost(now, f"it did nothing for {idle:.0f} s")

    def _give_up(self, code: int, reason: str) -> None:
        log.error("event=giving-up code=%d reason=%s", code, reason)
        self._code, self._reason = code, reason
        self._enter("ending")

    # Phases

    def _enter(self, phase: Phase) -> None:
        if phase != self.phase:
            log.info("event=phase from=%s to=%s steps=%d", self.phase, phase, self.steps)
            self.phase, self._phase_began = phase, self._clock()

    def _collect(self, now: float) -> None:
        if self._stop_requests or self.steps >= self.run.config.online.steps:
            self._reason = "stopped" if self._stop_requests else "finished"
            # Store all pending episodes even if the learner is behind: it catches up later.
            self.fleet.set_slack(NO_LIMIT)
            self.fleet.scale(0, now)
            self._enter("draining")

    def _drain(self, now: float) -> None:
        if self.fleet.has_drained or now - self._phase_began > 2 * DRAIN_SECONDS:
            self._enter("ending" if self._stop_requests else "learning")

    def _learn(self) -> None:
        """Wait until no update is owed for the store's content after all actors left."""
        status = self.fleet.learner_status
        is_known = self.fleet.store.reported_at >= self._phase_began
        if self._stop_requests:
            self._enter("ending")
        elif is_known and status is not None and status.updates >= self.owed:
            self._enter("saving")

    def _save(self) -> None:
        """Publish the last version. If the reply is lost, a new learner may have to catch up."""
        learner = self.fleet.learner
        if self._stop_requests:
            self._enter("ending")
        elif self._saving is None and learner.state == "up":
            self._saving = learner.handle.stop.remote(END_SECONDS)
        elif self._saving is not None and ray.wait([self._saving], timeout=0)[0]:
            reply, self._saving = self._saving, None
            try:
                is_saved: bool = ray.get(reply, timeout=1.0)
            except RayError as error:
                log.warning("event=save-again reason=%s", type(error).__name__)
                is_saved = False
            self._enter("evaluating" if is_saved else "learning")

    def _evaluate(self, now: float) -> None:
        if self._evaluations.is_done(now, self.steps) or self._stop_requests:
            self._enter("ending")

    def _end(self) -> None:
        """Let the learner save and the store close its log. They are not polled again."""
        if self._stop_requests and not self._code:
            self._reason = "stopped"  # replaces "finished"
        learner, store = self.fleet.learner.handle, self.fleet.store.handle
        calls: list[tuple[str, Callable[[], Any]]] = []
        if learner is not None:
            calls.append(("stop", lambda: learner.stop.remote(DRAIN_SECONDS)))
        if store is not None:
            calls.append(("close", store.close.remote))
        for name, call in calls:
            if not _completed(name, call):
                self._code = self._code or TERMINATED
        self._enter("ended")

    # Reports

    def view(self) -> RunView:
        """The run at this moment, for status and metrics."""
        fleet = self.fleet
        return RunView(
            config=self.run.config,
            phase=self.phase,
            snapshot=fleet.snapshot(),
            steps_per_second=self._rate.add(time.monotonic(), self.steps),
            stored=fleet.stored,
            learner=fleet.learner_status,
            owed=self.owed,
            processes=[process.view() for process in fleet.core],
            actors={slot: actor.view() for slot, actor in fleet.actors.items()},
            finished=list(fleet.finished),
            evaluations=self._evaluations.rows,
        )

    def _log(self, runlog: RunLog) -> None:
        if self.fleet.stored:
            runlog.write("fleet", self.steps, log_line(self.fleet.snapshot()))

    def _publish_status(self, now: float, *, force: bool = False) -> None:
        if now - self._status_written < STATUS_EVERY and not force:
            return
        self._status_written, view = now, self.view()
        status = describe(view) | {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "reason": self._reason,
            "code": self._code,
        }
        try:
            write_status(self.run.path, status)
        except OSError as error:  # such as a full disk, which is temporary
            log.warning("event=status-lost reason=%s", error)
        self._metrics(merge([view.snapshot, gauges(view)]), missing(view))
        self._show(status)


def _bounds(desired: DesiredState, fleet: FleetConfig) -> ActorBounds | None:
    """The bounds of autoscaling; None if a number was requested or no bounds are set."""
    if desired.min_actors is not None and desired.max_actors is not None:
        return ActorBounds(min_actors=desired.min_actors, max_actors=desired.max_actors)
    if desired.actors is None and fleet.most_actors:
        return ActorBounds(min_actors=fleet.least_actors, max_actors=fleet.most_actors)
    return None


def _completed(name: str, call: Callable[[], Any]) -> bool:
    """Whether a call completed in time. A call whose reply is lost is repeated."""
    deadline = time.monotonic() + END_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        try:
            reply = ray.get(call(), timeout=left)
        except ActorUnavailableError:
            time.sleep(PAUSE)
        except RayError as error:
            log.warning("event=end-failed method=%s reason=%s", name, type(error).__name__)
            return False
        else:
            return reply is not False
    return False
