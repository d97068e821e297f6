"""A process of a run that the driver creates, polls, and creates again when it is lost.

No call here blocks: a poll takes the replies that have arrived and sends the next request.
"""

import logging
import os
import signal
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from m3pc.core.restart_policy import RestartPolicy
from m3pc.core.subprocesses import start_time
from m3pc.distributed.run_view import ProcessState, ProcessView
from m3pc.telemetry.process_report import DetailT, ProcessReport

POLL_SECONDS = 1.0  # between two requests for a report
START_SECONDS = 600.0  # limit for the first report; the cluster may have to grow before

log = logging.getLogger(__name__)


class ProcessLocation(NamedTuple):
    """Identifies a process. The start time excludes a later process with the same pid."""

    node: str
    pid: int
    started: str


class SupervisedProcess(Generic[DetailT]):
    """A Ray actor that the driver starts, polls and restarts. Its reports carry a `DetailT`."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        *,
        patience: float,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """`make` returns the handle of a new actor. An actor that sends no report for `patience`
        seconds counts as hung and is killed."""
        self.name, self._make, self._patience = name, make, patience
        self.start_seconds = start_seconds
        self.restarts = RestartPolicy()
        self.state: ProcessState = "waiting"
        self.handle: Any = None
        self.report: ProcessReport[DetailT] | None = None  # the last one
        self.reported_at = 0.0  # when the last report was requested
        self.incarnation = 0  # number of processes so far that had this name
        self.location: ProcessLocation | None = None
        self.reason = ""  # why the process last ended
        self._next_start = 0.0
        self._requested = self._answered = 0.0
        self._pending: Any = None
        self._pending_location: Any = None

    def poll(self, now: float) -> None:
        """Start the process if due; take or request its report. Call this at least every second."""
        if self.state == "waiting" and now >= self._next_start:
            self._start(now)
        elif self.state in ("starting", "up"):
            self._receive(now)

    @property
    def is_working(self) -> bool:
        return self.state == "up"

    def view(self) -> ProcessView:
        return ProcessView(
            name=self.name,
            state=self.state,
            is_working=self.is_working,
            pid=self.location.pid if self.location else None,
            node=self.location.node if self.location else None,
            restarts=self.restarts.count,
            reason=self.reason,
        )

    def end(self) -> None:
        """Kill the process permanently."""
        if self.handle is not None:
            _kill_actor(self.handle)
        self.handle, self.state = None, "parked"

    def lost(self, now: float, reason: str) -> None:
        """Kill the process if it still runs, and restart it later unless it ended too often."""
        self.reason = reason
        if self.handle is not None:
            _kill_actor(self.handle)
        self.handle = self._pending = self.report = None
        restart_at = self.restarts.record_end(now)
        self.state = "parked" if restart_at is None else "waiting"
        self._next_start = now if restart_at is None else restart_at
        log.warning(
            "event=process-lost name=%s count=%d next=%s reason=%s",
            self.name,
            self.restarts.count,
            self.state if restart_at is None else f"{restart_at - now:.0f}s",
            reason,
        )

    def _start(self, now: float) -> None:
        try:
            self.handle = self._make()
        except (ValueError, RayError) as error:  # the dead process still holds the name
            self._next_start = now + POLL_SECONDS
            log.info("event=start-later name=%s reason=%s", self.name, error)
            return
        self.state, self.incarnation = "starting", self.incarnation + 1
        self._locate()
        self._answered = now
        self._request(now)
        log.info("event=process-started name=%s", self.name)

    def _report_request(self) -> Any:
        return self.handle.report.remote()

    def _request(self, now: float) -> None:
        self._pending, self._requested = self._report_request(), now

    def _receive(self, now: float) -> None:
        if self._pending is None:
            if now - self._requested >= POLL_SECONDS:
                self._request(now)
            return
        if ray.wait([self._pending], timeout=0)[0]:
            self._accept(now)
        elif self.location is None:
            if now - self._answered > self.start_seconds:
                self.lost(now, f"it did not start within {self.start_seconds:.0f} s")
        elif now - self._answered > self._patience:
            kill_process(self.location)
            self._hung(now)

    def _hung(self, now: float) -> None:
        self.lost(now, f"no answer for {now - self._answered:.0f} s")

    def _accept(self, now: float) -> None:
        pending, self._pending = self._pending, None
        try:
            self.report = ray.get(pending, timeout=1.0)
        except RayError as error:
            self._failed(now, error)
            return
        self.state, self._answered, self.reported_at = "up", now, self._requested
        if self.location is None and ray.wait([self._pending_location], timeout=0)[0]:
            try:
                self.location = ray.get(self._pending_location, timeout=1.0)
            except RayError:
                self._locate()

    def _failed(self, now: float, error: RayError) -> None:
        if isinstance(error, ActorUnavailableError):
            return  # only the reply was lost; the next poll sends a new request
        self.lost(now, reason_of(error))

    def _locate(self) -> None:
        """Request the location of the process behind the handle."""
        self.location = None
        self._pending_location = self.handle.__ray_call__.remote(_location)


class RayRestartedProcess(SupervisedProcess[DetailT]):
    """A process that Ray itself restarts, under the same handle. It comes back idle."""

    def _failed(self, now: float, error: RayError) -> None:
        if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
            self.lost(now, reason_of(error))

    def _hung(self, now: float) -> None:
        """Wait for the successor of the killed process. Ray starts it once a node has room."""
        self.reason = f"no answer for {now - self._answered:.0f} s"
        log.warning("event=process-hung name=%s reason=%s", self.name, self.reason)
        self._pending, self._answered = None, now
        self.report, self.state = None, "starting"
        self._locate()


def reason_of(error: RayError) -> str:
    """The error in one line: the last line of Ray's text holds an error of another process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason is known'}"[:500]


def kill_process(location: ProcessLocation) -> None:
    """Send SIGKILL from the process's machine: a stopped process does not answer Ray."""
    strategy = NodeAffinitySchedulingStrategy(node_id=location.node, soft=False)
    _kill_pid.options(scheduling_strategy=strategy).remote(location)


@ray.remote(num_cpus=0, max_retries=0)
def _kill_pid(location: ProcessLocation) -> None:
    if start_time(location.pid) == location.started:
        os.kill(location.pid, signal.SIGKILL)


def _location(actor: object) -> ProcessLocation:
    pid = os.getpid()
    return ProcessLocation(ray.get_runtime_context().get_node_id(), pid, start_time(pid))


def _kill_actor(handle: Any) -> None:
    try:
        ray.kill(handle)
    except RayError as error:
        log.info("event=kill-failed reason=%s", error)
