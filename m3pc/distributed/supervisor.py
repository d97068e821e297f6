"""One process of a fleet, as whoever drives the run sees it: made, asked, lost, made again.

Nothing here waits: every look takes what has come since the last one.
"""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from m3pc.core.restart_policy import RestartPolicy

ASK_EVERY = 1.0  # seconds
START_SECONDS = 600.0  # for a first answer; a cluster may have to grow before
ProcessState = Literal["waiting", "starting", "up", "parked"]


class ProcessLocation(NamedTuple):
    """Where a process is. Its number may be another's later, but not with the same begin."""

    node: str
    pid: int
    began: str


log = logging.getLogger(__name__)


class SupervisedProcess:
    """A process that only the driver starts again."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        *,
        patience: float,
        ask: Callable[[Any], Any] = lambda handle: handle.report.remote(),
    ) -> None:
        """`make` gives the handle of a new actor; one that does not answer for `patience` seconds
        hangs and is killed."""
        self.name, self._make, self._patience, self._ask = name, make, patience, ask
        self.restarts = RestartPolicy()
        self.state: ProcessState = "waiting"
        self.handle: Any = None
        self.report: Any = None  # the last one
        self.home: ProcessLocation | None = None
        self.reason = ""  # of the last end
        self._next = 0.0  # when to be made
        self._asked = self._answered = 0.0
        self.as_of = 0.0  # when the last report was asked for
        self._pending: Any = None
        self._where: Any = None

    def poll(self, now: float) -> None:
        if self.state == "waiting" and now >= self._next:
            self._start(now)
        elif self.state in ("starting", "up"):
            self._hear(now)

    @property
    def works(self) -> bool:
        return self.state == "up"

    def end(self) -> None:
        """Kill it and do not start it again."""
        if self.handle is not None:
            _kill(self.handle)
        self.handle, self.state = None, "parked"

    def lost(self, now: float, reason: str) -> None:
        """It ended, or has to: start it again later, if it did not end too often."""
        self.reason = reason
        if self.handle is not None:
            _kill(self.handle)
        self.handle = self._pending = self.report = None
        again = self.restarts.ended(now)
        self.state = "parked" if again is None else "waiting"
        self._next = now if again is None else again
        log.warning(
            "event=process-lost name=%s count=%d next=%s reason=%s",
            self.name,
            self.restarts.count,
            self.state if again is None else f"{again - now:.0f}s",
            reason,
        )

    def _start(self, now: float) -> None:
        try:
            self.handle = self._make()
        except (ValueError, RayError) as error:  # its name is still taken by the one that died
            self._next = now + ASK_EVERY
            log.info("event=start-later name=%s reason=%s", self.name, error)
            return
        self.state, self.home = "starting", None
        self._where = self.handle.__ray_call__.remote(_home)
        self._answered = now
        self._send(now)
        log.info("event=process-started name=%s", self.name)

    def _send(self, now: float) -> None:
        self._pending, self._asked = self._ask(self.handle), now

    def _hear(self, now: float) -> None:
        if self._pending is None:
            if now - self._asked >= ASK_EVERY:
                self._send(now)
            return
        answered, _ = ray.wait([self._pending], timeout=0)
        if answered:
            self._take(now)
        elif self.home is None:
            if now - self._answered > START_SECONDS:
                self.lost(now, f"it did not start within {START_SECONDS:.0f} s")
        elif now - self._answered > self._patience:
            kill_process(self.home)
            self.silent(now)

    def silent(self, now: float) -> None:
        self.lost(now, f"no answer for {now - self._answered:.0f} s")

    def _take(self, now: float) -> None:
        pending, self._pending = self._pending, None
        try:
            self.report = ray.get(pending, timeout=1.0)
        except RayError as error:
            self.failed(now, error)
            return
        self.state, self._answered, self.as_of = "up", now, self._asked
        if self.home is None:
            self._locate()

    def failed(self, now: float, error: RayError) -> None:
        if isinstance(error, ActorUnavailableError):
            return  # the answer was lost: ask again
        self.lost(now, reason_of(error))

    def _locate(self) -> None:
        found, _ = ray.wait([self._where], timeout=0)
        if found:
            try:
                self.home = ray.get(self._where, timeout=1.0)
            except RayError:
                self._where = self.handle.__ray_call__.remote(_home)


class RayRestartedProcess(SupervisedProcess):
    """A process that Ray starts again by itself, under the same handle. It comes back idle."""

    def failed(self, now: float, error: RayError) -> None:
        if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
            self.lost(now, reason_of(error))

    def silent(self, now: float) -> None:
        """It was killed: Ray makes another, if it finds a node for it. Nothing is known of that one
        yet."""
        self.reason = f"no answer for {now - self._answered:.0f} s"
        log.warning("event=process-hung name=%s reason=%s", self.name, self.reason)
        self._pending, self._answered = None, now
        self.report, self.state = None, "starting"
        self.moved()

    def moved(self) -> None:
        """Another process has its name: where is it?"""
        self.home = None
        self._where = self.handle.__ray_call__.remote(_home)


def reason_of(error: RayError) -> str:
    """In one line. What was raised in another process stands last in Ray's own words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason is known'}"[:500]


def kill_process(home: ProcessLocation) -> None:
    """From outside, on its own machine: a stopped process obeys nobody else."""
    strategy = NodeAffinitySchedulingStrategy(node_id=home.node, soft=False)
    _end_process.options(scheduling_strategy=strategy).remote(home)


@ray.remote(num_cpus=0, max_retries=0)
def _end_process(home: ProcessLocation) -> None:
    if _began(home.pid) == home.began:
        os.kill(home.pid, signal.SIGKILL)


def _home(actor: object) -> ProcessLocation:
    pid = os.getpid()
    return ProcessLocation(ray.get_runtime_context().get_node_id(), pid, _began(pid))


def _began(pid: int) -> str:
    """When a process began, as Linux tells; elsewhere nothing is told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _kill(handle: Any) -> None:
    try:
        ray.kill(handle)
    except RayError as error:
        log.info("event=kill-failed reason=%s", error)
