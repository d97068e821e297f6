"""A rollout process from idle to ended, without Ray: environments, planner and store are joined."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from actors.ack_log import AckLog
from actors.fault_tolerant_envs import FaultTolerantEnvs, StepWatchdog
from actors.membership import Membership
from actors.outbox import Outbox
from actors.reports import RolloutReport, RolloutState
from actors.rollout_loop import ExplorationConfig, RolloutLoop
from actors.watchdog import EnvWatchdog
from m3pc.core.seeding import rollout_episodes
from m3pc.envs import make
from m3pc.telemetry.catalogue import ENV_FAULTS
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Coordinator, Episode, EpisodeSink, PlannerEndpoint

REGISTER_SECONDS: Final = 0.2  # between two looks at whether to go on, before registration

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What to collect, and by whose help. Small and picklable: it travels to another process."""

    env_id: str
    seed: int  # of the run
    acting: ExplorationConfig
    planner: PlannerEndpoint
    sink: EpisodeSink
    encode: Callable[[Episode], bytes]
    connect: Callable[[], Coordinator]
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for gymnasium.make
    envs: int = 4
    step_timeout: float = 30.0  # seconds
    unacked: int = 32  # episodes that may wait for the store
    heartbeat: float = 2.0  # seconds between two
    receipts: Path | None = None  # file for a line per acknowledged episode


class WatchdogFactory(Protocol):
    def __call__(self, timeout: float, save: Callable[[int, float], object]) -> EnvWatchdog: ...


class RolloutWorker:
    """What the process of one slot does. Each `start` is a new incarnation."""

    def __init__(
        self,
        slot: int,
        *,
        watches: WatchdogFactory = EnvWatchdog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slot, self._watches, self._clock = slot, watches, clock
        self._lock = threading.Lock()
        self._forget()
        self._state: RolloutState = "idle"

    def _forget(self) -> None:
        self._recorder = Recorder()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._membership: Membership | None = None
        self._outbox: Outbox | None = None
        self._worker: RolloutLoop | None = None
        self._reason, self._left = "", 0.0

    def start(self, order: RolloutConfig) -> None:
        """Begin to collect, in a thread; while it runs already, nothing."""
        with self._lock:
            if self._state in ("running", "draining"):
                return
            self._forget()
            self._state = "running"
            self._thread = threading.Thread(
                target=self._work, args=(order,), name="collector", daemon=True
            )
            self._thread.start()

    def report(self, after: int = -1) -> RolloutReport:
        """With the finished episodes whose numbers are above `after`."""
        worker, membership = self._worker, self._membership
        return RolloutReport(
            state=self._state,
            reason=self._reason,
            pid=os.getpid(),
            slot=self._slot,
            incarnation=membership.incarnation if membership else -1,
            unacked=worker.unacked if worker else 0,
            snapshot=self._recorder.snapshot(),
            finished=tuple(worker.finished(after)) if worker else (),
        )

    def drain(self, seconds: float) -> int:
        """End within so many seconds, with as much as possible in the store; how much is not."""
        self._end("drained", seconds, draining=True)
        if self._thread is not None:
            self._thread.join(seconds)
        return self._worker.unacked if self._worker else 0

    def stop(self, reason: str = "stopped") -> None:
        """End soon."""
        self._end(reason, 0.0)

    def _end(self, reason: str, seconds: float, *, draining: bool = False) -> None:
        with self._lock:
            if self._state not in ("running", "draining"):
                return
            self._state = "draining" if draining else self._state
            self._reason = self._reason or reason
            self._left = seconds
            self._stop.set()
            if self._worker is not None:
                self._worker.stop(seconds)

    def _work(self, order: RolloutConfig) -> None:
        state: RolloutState = "ended"
        try:
            with ExitStack() as stack:
                self._collect(order, stack)
            failure = self._outbox.failure if self._outbox else ""
        except Exception as error:
            log.exception("event=collector-failed slot=%d", self._slot)
            failure = f"{type(error).__name__}: {error}"
        if failure:
            state, self._reason = "failed", failure
        elif self._outbox and self._outbox.fenced:
            self._reason = "fenced"
        with self._lock:
            self._state = state
        log.info("event=collector-%s slot=%d reason=%s", state, self._slot, self._reason)

    def _collect(self, order: RolloutConfig, stack: ExitStack) -> None:
        incarnation = self._register(order, stack)
        if incarnation is None:
            return
        watchdog = stack.enter_context(closing(self._watches(order.step_timeout, self._hung)))
        watchdog.start()
        halves = [
            stack.enter_context(closing(envs)) for envs in _halves(order, self._recorder, watchdog)
        ]
        self._outbox = stack.enter_context(closing(self._open_outbox(order, incarnation, stack)))
        worker = RolloutLoop(
            halves,
            order.acting,
            planner=order.planner,
            outbox=self._outbox,
            encode=order.encode,
            starts=rollout_episodes(order.seed, self._slot, incarnation),
            recorder=self._recorder,
            newest=self._membership.newest if self._membership else lambda: None,
            clock=self._clock,
        )
        with self._lock:
            self._worker = worker
            if self._stop.is_set():
                worker.stop(self._left)
        worker.run()

    def _register(self, order: RolloutConfig, stack: ExitStack) -> int | None:
        """For as long as it takes; None if told to stop before."""
        self._membership = membership = Membership(
            order.connect,
            self._slot,
            recorder=self._recorder,
            on_lost=partial(self.stop, "fenced"),
            period=order.heartbeat,
        )
        stack.enter_context(closing(membership))
        while not membership.registered(REGISTER_SECONDS):
            if self._stop.is_set():
                return None
        return membership.incarnation

    def _open_outbox(self, order: RolloutConfig, incarnation: int, stack: ExitStack) -> Outbox:
        options: dict[str, Any] = {}
        if order.receipts is not None:
            options["on_ack"] = stack.enter_context(closing(AckLog(order.receipts)))
        return Outbox(
            order.sink,
            self._slot,
            incarnation,
            recorder=self._recorder,
            most=order.unacked,
            **options,
        )

    def _hung(self, env: int, seconds: float) -> None:
        self._recorder.add(ENV_FAULTS, label="timeout")
        if self._worker is not None:
            self._worker.save(seconds)


def _halves(
    order: RolloutConfig, recorder: Recorder, watch: StepWatchdog
) -> Iterator[FaultTolerantEnvs]:
    """One step while a planner thinks about the other; a single environment has no other."""
    first = (order.envs + 1) // 2
    for begin, end in ((0, first), (first, order.envs)):
        if end > begin:
            making = partial(make, order.env_id, **order.env_kwargs)
            yield FaultTolerantEnvs(
                making, end - begin, recorder=recorder, watch=watch, first=begin
            )
