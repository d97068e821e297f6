"""An online run on Ray, from its start to its end, and the one process that drives it.

    collecting ─> draining ─> learning ─> saving ─> evaluating ─> ending
                      ^                                              ^
      stop, SIGTERM ──┴──────────────────────────────────────────────┘

Draining: actors store what they have. Learning: the updates that are still owed. Saving: the last
version is published. A run that is told to stop goes from draining to ending at once; `m3pc resume`
goes on with it.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import ray
from ray.exceptions import ActorUnavailableError, RayError

from m3pc.config.schema import FleetConfig
from m3pc.core.exit_codes import (
    DIVERGED,
    INTERNAL,
    IO_FAILED,
    OK,
    OUT_OF_MEMORY,
    PARKED,
    TERMINATED,
)
from m3pc.core.signals import handled
from m3pc.distributed.autoscaler import ActorBounds, Autoscaler
from m3pc.distributed.endpoints import NAMESPACE, RunEndpoints
from m3pc.distributed.evaluation_scheduler import EvaluationScheduler
from m3pc.distributed.fleet import ProcessFleet
from m3pc.distributed.metrics_endpoint import MetricsEndpoint, PublishMetrics, told_metrics
from m3pc.distributed.run_metrics import gauges, missing
from m3pc.distributed.status import RateMeter, describe, log_line
from m3pc.online.learner_loop import LearnerReport
from m3pc.online.recovery import WEIGHTS
from m3pc.online.results import save_pictures
from m3pc.online.run_control import (
    DesiredState,
    read_desired_state,
    read_status,
    request,
    write_status,
)
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.ray_nodes.connection import connected
from m3pc.telemetry.recorder import merged
from m3pc.tracking.run_lock import locked
from m3pc.tracking.run_log import RunLog
from m3pc.tracking.trackers import Tracker, tracker
from m3pc.types import Coordinator, CoordinatorUnavailableError, DivergedError, InputError
from replay.server.schedule import schedule_of

PAUSE = 0.2  # seconds between two looks
TELL_EVERY, LOG_EVERY = 0.5, 10.0  # seconds
DRAIN_SECONDS, END_SECONDS = 10.0, 30.0
LEARNER_HUNG = 600.0  # seconds in which a learner did nothing
LOGICAL_CPUS = 256  # of a private cluster: room for as many actors as anybody asks for
NO_LIMIT = 10**9  # steps
# Why a learner ended, by the name of its error; whatever else it was, it may pass.
REASONS = {
    DivergedError.__name__: DIVERGED,
    "MemoryError": OUT_OF_MEMORY,
    "OutOfMemoryError": OUT_OF_MEMORY,
}

Phase = Literal["collecting", "draining", "learning", "saving", "evaluating", "ending", "ended"]
Show = Callable[[Mapping[str, Any]], None]

LOG, LOGS = "driver.log", "logs"  # of this process; of all others on a private cluster
LOG_BYTES = 10 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    code: int
    reason: str
    steps: int


def run_cluster(
    path: Path,
    show: Show,
    *,
    address: str | None,
    coordinator: str = "",
    metrics: MetricsEndpoint | None = None,
    track: str = "",
) -> RunOutcome:
    """Drive a run until it has its steps, is told to stop, or cannot go on."""
    path = path.resolve()  # processes elsewhere start in other folders
    with locked(path):
        run = open_run(path)
        if _finished(run):
            return RunOutcome(code=OK, reason="finished", steps=read_status(path)["steps"])
        place = RunEndpoints(
            run=path,
            id=run.facts.id,
            coordinator=coordinator,
            roles=run.config.fleet.roles and address is not None,
        )
        _check_place(run, place)
        tracked = tracker(track, path, run.config)
        own = {"cpus": LOGICAL_CPUS, "gpus": _gpus(run)} if address is None else {}
        with _logged(path / LOG):
            with connected(address, namespace=NAMESPACE, logs=path / LOGS, **own):
                check_machines(place)
                with told_metrics(path, metrics) as tell_metrics:
                    outcome = Driver(
                        run, place, show, metrics=tell_metrics, tracker=tracked
                    ).drive()
            save_pictures(run)
        return outcome


def _check_place(run: OnlineRun, place: RunEndpoints) -> None:
    """Before anything starts: what every process would stumble over is told at once."""
    run.logged()
    try:
        with closing(place.connect()) as coordinator:
            coordinator.read(WEIGHTS)
    except CoordinatorUnavailableError as error:
        raise InputError(
            f"no coordinator answers: {error}; start it, or give its address"
        ) from None


def check_machines(place: RunEndpoints) -> None:
    """SQLite's locks and this machine's clock hold on one machine."""
    nodes: list[dict[str, Any]] = cast(Any, ray).nodes()
    hosts = sorted({node["NodeManagerHostname"] for node in nodes if node["Alive"]})
    if len(hosts) > 1 and not place.coordinator:
        raise InputError(
            f"the cluster has {len(hosts)} machines ({', '.join(hosts[:3])}), which cannot meet in "
            "a file; start a Redis and give its address by --coordinator or M3PC_COORDINATOR"
        )


def _finished(run: OnlineRun) -> bool:
    """Whether a driver brought all of it to an end: then nothing has to be started."""
    last = read_status(run.path)
    expected = {"state": "ended", "reason": "finished", "code": OK, "of": run.config.online.steps}
    return all(last.get(name) == value for name, value in expected.items())


def _gpus(run: OnlineRun) -> int | None:
    """Those that the settings ask for, or as many as Ray finds."""
    fleet = run.config.fleet
    asked = fleet.planners * fleet.planner_gpus + fleet.learners * fleet.learner_gpus
    return max(1, round(asked + 0.5)) if asked and run.config.compute.device == "cpu" else None


class Driver:
    def __init__(
        self,
        run: OnlineRun,
        place: RunEndpoints,
        show: Show,
        *,
        metrics: PublishMetrics = lambda snapshot, missing: None,
        tracker: Tracker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self._show, self._metrics, self._clock = run, show, metrics, clock
        self._tracker = tracker
        self._coordinator: Coordinator = place.connect()
        self.fleet = ProcessFleet(run, place)
        self.phase: Phase = "collecting"
        self._stopping = self._code = 0
        self._saved: Any = None
        self._reason = ""
        self._since = clock()  # of the phase
        self._told = self._logged = -1e9
        self._wanted = run.config.fleet.actors
        self._autoscaler: Autoscaler | None = None
        self.rate = RateMeter()
        self.examiner = EvaluationScheduler(run, self.fleet.evaluator, self._coordinator)
        request(run.path, stop=False)

    def drive(self) -> RunOutcome:
        runlog = RunLog(self.run.path, done=10**12, unit="step", vital=False, tracker=self._tracker)
        with handled(self._signalled), runlog:
            try:
                while self.phase != "ended":
                    self.turn(self._clock(), runlog)
                    time.sleep(PAUSE)
            finally:
                self._log(runlog)
                self._tell(self._clock(), force=True)
                self.fleet.end()
                self._coordinator.close()
        return RunOutcome(code=self._code, reason=self._reason, steps=self.steps)

    @property
    def steps(self) -> int:
        return self.fleet.stored.steps if self.fleet.stored else 0

    def turn(self, now: float, runlog: RunLog) -> None:
        self._obey()
        self.fleet.poll(now)
        self._check()
        getattr(self, f"_{self.phase}")(now)
        if self.phase in ("collecting", "evaluating"):
            last = self.phase == "evaluating"
            self.examiner.poll(now, self.steps, runlog, last=last)
        self._tell(now)
        if now - self._logged >= LOG_EVERY:
            self._logged = now
            self._log(runlog)

    # What is asked from outside

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._stopping += 1
        if self._stopping > 1:
            os._exit(TERMINATED)

    def _obey(self) -> None:
        try:
            asked = read_desired_state(self.run.path)
        except InputError as error:  # the run goes on as it is
            log.warning("event=wanted-unreadable reason=%s", error)
            return
        if asked.stop and not self._stopping:
            self._stopping = 1
        if self.phase == "collecting":
            self._scale(asked, self._clock())

    def _scale(self, asked: DesiredState, now: float) -> None:
        """To the number that was asked for, or to one between the bounds that fits the load."""
        bounds = _bounds(asked, self.run.config.fleet)
        if bounds is None:
            self._autoscaler = None
            self._wanted = self._wanted if asked.actors is None else asked.actors
        else:
            if self._autoscaler is None or self._autoscaler.bounds != bounds:
                self._autoscaler = Autoscaler(bounds)
            before, running = self._wanted, self.fleet.running
            self._wanted = self._autoscaler.decide(
                now, self.fleet.snapshot(), actors=before, running=running
            )
            if self._wanted != before:
                self.fleet.scaled(before, self._wanted)
                log.info("event=autoscaled from=%d to=%d", before, self._wanted)
        self.fleet.scale(self._wanted, now)

    def _check(self) -> None:
        """Whether the run can go on at all."""
        if self.fleet.parked and self.phase == "collecting":
            reasons = sorted({actor.reason for actor in self.fleet.actors.values()})
            self._give_up(PARKED, f"every actor ended too often: {'; '.join(reasons)[:500]}")
        for seat in (self.fleet.store, self.fleet.learner, *self.fleet.planners):
            if seat.state == "parked" and self.phase not in ("ending", "ended"):
                code = IO_FAILED if seat is self.fleet.store else INTERNAL
                self._give_up(code, f"{seat.name} ended too often: {seat.reason[:500]}")
        learnt = self.fleet.learnt
        if learnt is not None:
            self._check_learner(learnt)

    def _check_learner(self, learnt: LearnerReport) -> None:
        if learnt.error and self.phase not in ("ending", "ended"):
            final = REASONS.get(learnt.error.partition(":")[0])
            if final is not None:
                self._give_up(final, f"the learner ended by {learnt.error}")
            else:
                self.fleet.learner.lost(self._clock(), learnt.error)
        elif learnt.idle > LEARNER_HUNG and self.phase in ("collecting", "learning"):
            self.fleet.learner.lost(self._clock(), f"it did nothing for {learnt.idle:.0f} s")

    def _give_up(self, code: int, reason: str) -> None:
        log.error("event=giving-up code=%d reason=%s", code, reason)
        self._code, self._reason = code, reason
        self._enter("ending")

    # Phases

    def _enter(self, phase: Phase) -> None:
        if phase != self.phase:
            log.info("event=phase from=%s to=%s steps=%d", self.phase, phase, self.steps)
            self.phase, self._since = phase, self._clock()

    def _collecting(self, now: float) -> None:
        if self._stopping or self.steps >= self.run.config.online.steps:
            self._reason = "stopped" if self._stopping else "finished"
            # What is on its way is stored, though the learner may be behind: it catches up later.
            self.fleet.set_slack(NO_LIMIT)
            self.fleet.scale(0, now)
            self._enter("draining")

    def _draining(self, now: float) -> None:
        if self.fleet.left or now - self._since > 2 * DRAIN_SECONDS:
            self._enter("ending" if self._stopping else "learning")

    def _learning(self, now: float) -> None:
        """Until nothing is owed by what the store holds after all actors left."""
        learnt, known = self.fleet.learnt, self.fleet.store.as_of >= self._since
        caught_up = known and learnt is not None and learnt.updates >= self.owed
        if self._stopping:
            self._enter("ending")
        elif caught_up:
            self._enter("saving")

    def _saving(self, now: float) -> None:
        """Where the answer is lost, or the learner, its successor may have to catch up first."""
        learner = self.fleet.learner
        if self._stopping:
            self._enter("ending")
        elif self._saved is None and learner.state == "up":
            self._saved = learner.handle.stop.remote(END_SECONDS)
        elif self._saved is not None and ray.wait([self._saved], timeout=0)[0]:
            answer, self._saved = self._saved, None
            try:
                saved: bool = ray.get(answer, timeout=1.0)
            except RayError as error:
                log.warning("event=save-again reason=%s", type(error).__name__)
                saved = False
            self._enter("evaluating" if saved else "learning")

    def _evaluating(self, now: float) -> None:
        if self.examiner.is_done(now, self.steps) or self._stopping:
            self._enter("ending")

    def _ending(self, now: float) -> None:
        """The learner saves, the store closes its log. After that nothing of it is looked at."""
        if self._stopping and not self._code:
            self._reason = "stopped"  # whatever it was about to say
        calls = [
            (self.fleet.learner.handle, "stop", (DRAIN_SECONDS,)),
            (self.fleet.store.handle, "close", ()),
        ]
        for handle, method, arguments in calls:
            if handle is not None and not _called(handle, method, arguments):
                self._code = self._code or TERMINATED
        self._enter("ended")

    @property
    def owed(self) -> int:
        stored = self.fleet.stored
        if stored is None:
            return 0
        schedule = schedule_of(self.run.config.online, self.run.facts.max_episode_steps)
        return schedule.owed(stored.steps, stored.episodes)

    # What is told

    def _log(self, runlog: RunLog) -> None:
        if self.fleet.stored:
            runlog.write("fleet", self.steps, log_line(self.fleet.snapshot()))

    def _tell(self, now: float, *, force: bool = False) -> None:
        if now - self._told >= TELL_EVERY or force:
            self._told = now
            about = {"pid": os.getpid(), "host": socket.gethostname()}
            about |= {"reason": self._reason, "code": self._code}
            status = describe(self) | about
            try:
                write_status(self.run.path, status)
            except OSError as error:  # a full disk passes
                log.warning("event=status-lost reason=%s", error)
            self._metrics(merged([self.fleet.snapshot(), gauges(self)]), missing(self))
            self._show(status)


def _bounds(asked: DesiredState, fleet: FleetConfig) -> ActorBounds | None:
    """None where a number was asked for, or neither that nor bounds."""
    if asked.least is not None and asked.most is not None:
        return ActorBounds(least=asked.least, most=asked.most)
    if asked.actors is None and fleet.most_actors:
        return ActorBounds(least=fleet.least_actors, most=fleet.most_actors)
    return None


def _called(handle: Any, method: str, arguments: tuple[Any, ...]) -> bool:
    """Whether it was done in time. What is called here may be called again: a reply can be lost."""
    end = time.monotonic() + END_SECONDS
    while (left := end - time.monotonic()) > 0:
        try:
            answer = ray.get(getattr(handle, method).remote(*arguments), timeout=left)
        except ActorUnavailableError:
            time.sleep(PAUSE)
        except RayError as error:
            log.warning("event=end-failed method=%s reason=%s", method, type(error).__name__)
            return False
        else:
            return answer is not False
    return False


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What this process logs, in a file of the run: a terminal has no room for it."""
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger("m3pc")
    before = root.level, root.propagate
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        root.propagate = before[1]
        handler.close()
