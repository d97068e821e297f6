"""Runs a rollout process from idle to ended, without Ray."""

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

from actors.fault_tolerant_envs import FaultTolerantEnvs
from actors.membership import Membership
from actors.outbox import AckLog, Outbox
from actors.reports import RolloutState, RolloutStatus
from actors.rollout_loop import ExplorationConfig, RolloutLoop
from actors.watchdog import EnvWatchdog
from m3pc.core.seeding import rollout_episodes
from m3pc.envs import make
from m3pc.telemetry.catalogue import ENV_FAULTS
from m3pc.telemetry.process_report import ProcessReport
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Coordinator, Episode, EpisodeSink, PlannerEndpoint

REGISTER_SECONDS: Final = 0.2  # how long to wait for registration before testing whether to stop

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What to collect, and with which services. Small and picklable: it is sent to a process."""

    env_id: str
    seed: int  # the run's seed
    exploration: ExplorationConfig
    planner: PlannerEndpoint
    sink: EpisodeSink
    encode: Callable[[Episode], bytes]
    connect: Callable[[], Coordinator]
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of gymnasium.make
    envs: int = 4
    step_timeout: float = 30.0  # seconds before an environment counts as hung
    max_unacked: int = 32  # episodes that may wait for the store
    heartbeat: float = 2.0  # seconds between two heartbeats
    ack_log: Path | None = None  # file that gets a line per acknowledged episode


class WatchdogFactory(Protocol):
    def __call__(self, timeout: float, save: Callable[[int, float], object]) -> EnvWatchdog: ...


class RolloutWorker:
    """Registers its slot and runs a `RolloutLoop` in a thread. Each `start` is an incarnation."""

    def __init__(
        self,
        slot: int,
        *,
        make_watchdog: WatchdogFactory = EnvWatchdog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slot, self._make_watchdog, self._clock = slot, make_watchdog, clock
        self._lock = threading.Lock()
        self._reset()
        self._state: RolloutState = "idle"

    def _reset(self) -> None:
        """Forget the previous incarnation."""
        self._recorder = Recorder()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._membership: Membership | None = None
        self._outbox: Outbox | None = None
        self._loop: RolloutLoop | None = None
        self._reason, self._drain_seconds = "", 0.0

    def start(self, config: RolloutConfig) -> None:
        """Begin to collect in a thread; does nothing if already running."""
        with self._lock:
            if self._state in ("running", "draining"):
                return
            self._reset()
            self._state = "running"
            self._thread = threading.Thread(
                target=self._work, args=(config,), name="collector", daemon=True
            )
            self._thread.start()

    def report(self, after: int = -1) -> ProcessReport[RolloutStatus]:
        """The status, with the finished episodes numbered above `after`."""
        loop, membership = self._loop, self._membership
        status = RolloutStatus(
            state=self._state,
            reason=self._reason,
            slot=self._slot,
            incarnation=membership.incarnation if membership else -1,
            unacked=loop.unacked if loop else 0,
            finished=tuple(loop.finished(after)) if loop else (),
        )
        return ProcessReport(pid=os.getpid(), snapshot=self._recorder.snapshot(), detail=status)

    def drain(self, seconds: float) -> int:
        """Send the remaining episodes and end within `seconds`. Returns how many are unacked."""
        self._end("drained", seconds, draining=True)
        if self._thread is not None:
            self._thread.join(seconds)
        return self._loop.unacked if self._loop else 0

    def stop(self, reason: str = "stopped") -> None:
        """End soon, without waiting for the store."""
        self._end(reason, 0.0)

    def _end(self, reason: str, seconds: float, *, draining: bool = False) -> None:
        with self._lock:
            if self._state not in ("running", "draining"):
                return
            self._state = "draining" if draining else self._state
            self._reason = self._reason or reason
            self._drain_seconds = seconds
            self._stop.set()
            if self._loop is not None:
                self._loop.stop(seconds)

    def _work(self, config: RolloutConfig) -> None:
        state: RolloutState = "ended"
        try:
            with ExitStack() as stack:
                self._collect(config, stack)
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

    def _collect(self, config: RolloutConfig, stack: ExitStack) -> None:
        """Register, open what the loop needs, run it. The stack closes all in reverse order."""
        self._membership = membership = Membership(
            config.connect,
            self._slot,
            recorder=self._recorder,
            on_lost=partial(self.stop, "fenced"),
            period=config.heartbeat,
        )
        stack.enter_context(closing(membership))
        while not membership.wait_registered(REGISTER_SECONDS):
            if self._stop.is_set():
                return
        watchdog = stack.enter_context(
            closing(self._make_watchdog(config.step_timeout, self._env_hung))
        )
        watchdog.start()
        buffers = [
            stack.enter_context(closing(envs)) for envs in self._env_buffers(config, watchdog)
        ]
        path = config.ack_log
        ack_log = stack.enter_context(closing(AckLog(path))) if path is not None else None
        self._outbox = Outbox(
            config.sink,
            self._slot,
            membership.incarnation,
            recorder=self._recorder,
            max_episodes=config.max_unacked,
            on_ack=ack_log,
        )
        stack.enter_context(closing(self._outbox))
        loop = RolloutLoop(
            buffers,
            config.exploration,
            planner=config.planner,
            outbox=self._outbox,
            encode=config.encode,
            starts=rollout_episodes(config.seed, self._slot, membership.incarnation),
            recorder=self._recorder,
            newest=membership.newest,
            clock=self._clock,
        )
        with self._lock:
            self._loop = loop
            if self._stop.is_set():
                loop.stop(self._drain_seconds)
        loop.run()

    def _env_buffers(
        self, config: RolloutConfig, watchdog: EnvWatchdog
    ) -> Iterator[FaultTolerantEnvs]:
        """Two halves: one steps while the planner decides for the other."""
        half = (config.envs + 1) // 2
        for first, end in ((0, half), (half, config.envs)):
            if end > first:
                yield FaultTolerantEnvs(
                    partial(make, config.env_id, **config.env_kwargs),
                    end - first,
                    recorder=self._recorder,
                    watchdog=watchdog,
                    first=first,
                )

    def _env_hung(self, env: int, seconds: float) -> None:
        """The watchdog is about to end the process: save what was collected."""
        self._recorder.add(ENV_FAULTS, label="timeout")
        if self._loop is not None:
            self._loop.save(seconds)
