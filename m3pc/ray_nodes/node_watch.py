"""Supervises the processes of a Ray node; when stopped, it ends exactly those processes.

process       what happens when it ends
raylet        Ray does not take a lost node back: a head exits (69), a worker joins as a new node
gcs_server    it is restarted if its tables are in Redis; otherwise the cluster is lost (69)
the others    they are restarted
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from m3pc.core.backoff import Backoff
from m3pc.core.exit_codes import CONTROL_LOST, OK, TERMINATED
from m3pc.core.restart_policy import RestartPolicy
from m3pc.core.signals import handle_signals
from m3pc.ray_nodes import processes
from m3pc.ray_nodes.gcs_storage import record_namespace
from m3pc.ray_nodes.node import FOLDER_VARIABLE, RAY_FOLDER, Node
from m3pc.tracking.run_lock import locked
from m3pc.types import InputError

POLL_SECONDS = 0.1
HEAD_TRIES = 3
START_SECONDS, END_SECONDS = 120.0, 5.0
BACKOFF = Backoff(first=1.0, longest=30.0)  # before a node joins again
STEADY_SECONDS = 60.0  # the back-off starts anew after the node was up for so long
GCS, RAYLET = "gcs_server", "raylet"
START_LOG, LAST_LINES = "start.log", 15

log = logging.getLogger(__name__)


def run_node(node: Node, on_up: Callable[[], None]) -> int:
    """Run a node until a signal and return the exit code. `on_up` is called after each start."""
    with locked(node.folder):
        end_leftovers(node.folder)
        node.ports.require_free(node.ip, head=node.is_head)
        shutil.rmtree(node.folder / RAY_FOLDER, ignore_errors=True)  # left by an earlier node
        if node.store is None:
            return NodeWatch(node, on_up).run()
        node.store.check()
        record_namespace(node.store, node.folder)
        try:
            return NodeWatch(node, on_up).run()
        finally:
            node.store.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeService:
    """A process of the node: how to start it again."""

    name: str
    command: list[str]
    environment: dict[str, str]

    def start(self) -> int:
        no_output = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
        return os.posix_spawn(
            self.command[0], self.command, self.environment, file_actions=no_output, setsid=True
        )


class NodeWatch:
    """Starts the processes of a node, restarts them if they end, and finally ends them all."""

    def __init__(
        self, node: Node, on_up: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node, self._on_up, self._clock = node, on_up, clock
        self._signals = 0
        self._services: dict[int, NodeService] = {}
        self._restarts_due: list[tuple[float, NodeService]] = []
        self._restarts: defaultdict[str, RestartPolicy] = defaultdict(RestartPolicy)

    def run(self) -> int:
        """Run until a signal (returns 0) or until the node is lost (returns 69)."""
        processes.adopt_orphans()
        with handle_signals(self._signalled):
            try:
                return self._run_head() if self._node.is_head else self._run_worker()
            finally:
                self._end()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            processes.send_signal(processes.descendants([os.getpid()]), signal.SIGKILL)
            os._exit(TERMINATED)

    def _run_head(self) -> int:
        """Start, in up to HEAD_TRIES tries: on a busy machine Ray's limit of 30 s may pass."""
        for left in reversed(range(HEAD_TRIES)):
            failure = self._start()
            if not failure or self._signals:
                break
            if not left:
                logs = self._node.folder / RAY_FOLDER / "session_latest" / "logs"
                raise InputError(f"the head did not start: {failure}; its logs: {logs}")
            log.warning("event=start-again tries=%d reason=%s", left, failure)
            self._end()
            if self._node.store:
                self._node.store.clear()
        return self._watch()

    def _run_worker(self) -> int:
        """Join the head as often as needed: it may be away or not started yet."""
        failures = 0
        while not self._signals:
            failure = self._unreachable() or self._start()
            began = self._clock()
            if (not failure and self._watch() == OK) or self._signals:
                return OK
            if failure:
                log.warning("event=not-joined head=%s reason=%s", self._node.head_address, failure)
            self._end()
            failures = 1 if self._clock() - began > STEADY_SECONDS else failures + 1
            pause = BACKOFF.pause(failures)
            log.warning("event=joins-again head=%s in=%.0fs", self._node.head_address, pause)
            self._sleep(pause)
        return OK

    # Starting

    def _start(self) -> str:
        """Start the node. Return why it did not start; "" if it did."""
        path = self._node.folder / START_LOG
        with path.open("wb") as file:
            process = subprocess.Popen(
                self._node.command(),
                env=self._node.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only this process gets the terminal's Ctrl-C
            )
        until = self._clock() + START_SECONDS
        while process.poll() is None:
            if self._signals or self._clock() > until:
                process.kill()
                process.wait()
                return "it was stopped" if self._signals else f"not in {START_SECONDS:.0f} s"
            time.sleep(POLL_SECONDS)
        if process.returncode:
            return f"ray start ended with code {process.returncode}: {_last_lines(path)}"
        self._services, self._restarts_due = _services(), []
        names = {service.name for service in self._services.values()}
        if missing := {RAYLET, *([GCS] if self._node.is_head else [])} - names:
            return f"{' and '.join(sorted(missing))} ended at once"
        log.info("event=node-up address=%s processes=%d", self._node.address, len(self._services))
        self._on_up()
        return ""

    def _unreachable(self) -> str:
        """Return why the head does not answer, or "". Ray itself would try for half a minute."""
        host, _, port = str(self._node.head_address).rpartition(":")
        try:
            socket.create_connection((host, int(port)), END_SECONDS).close()
        except OSError as error:
            return f"no answer: {error}"
        return ""

    # Watching

    def _watch(self) -> int:
        while not self._signals:
            for pid, code in processes.reap_children().items():
                service = self._services.pop(pid, None)
                if service is not None and self._is_lost(service, pid, code):
                    return CONTROL_LOST
            now = self._clock()
            for due in [due for due in self._restarts_due if due[0] <= now]:
                self._restarts_due.remove(due)
                self._restart(due[1])
            time.sleep(POLL_SECONDS)
        return OK

    def _is_lost(self, service: NodeService, pid: int, code: int) -> bool:
        log.warning("event=process-ended name=%s pid=%d code=%d", service.name, pid, code)
        if service.name == RAYLET:
            log.error("event=node-lost reason=raylet-ended code=%d", code)
            return True
        if service.name == GCS and self._node.store is None:
            log.error(
                "event=cluster-lost reason=gcs-ended code=%d memory=none "
                "remedy='start the head with --redis'",
                code,
            )
            return True
        restarts = self._restarts[service.name]
        restart_at = restarts.record_end(self._clock())
        if restart_at is not None:
            self._restarts_due.append((restart_at, service))
            return False
        log.error("event=given-up name=%s ends=%d", service.name, restarts.count)
        return service.name == GCS

    def _restart(self, service: NodeService) -> None:
        pid = service.start()
        self._services[pid] = service
        log.warning("event=process-started-again name=%s pid=%d", service.name, pid)

    def _sleep(self, seconds: float) -> None:
        until = self._clock() + seconds
        while self._clock() < until and not self._signals:
            time.sleep(POLL_SECONDS)

    def _end(self) -> None:
        """End the raylet first: it reports its end to the cluster and ends its workers."""
        raylets = [pid for pid, service in self._services.items() if service.name == RAYLET]
        processes.end_descendants(raylets, END_SECONDS)
        self._services = {}


def end_leftovers(folder: Path) -> None:
    """End processes that a killed supervisor left and that hold the node's ports. The caller holds
    the folder's lock."""
    pids = processes.find_by_variable(FOLDER_VARIABLE, str(folder)) - {os.getpid()}
    if pids:
        log.warning("event=leftovers-ended folder=%s processes=%d", folder, len(pids))
        processes.send_signal(pids, signal.SIGKILL)
        until = time.monotonic() + END_SECONDS
        while processes.find_by_variable(FOLDER_VARIABLE, str(folder)) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


def _services() -> dict[int, NodeService]:
    services = {}
    for pid in processes.children():
        command = processes.command_of(pid)
        environment = processes.environment_of(pid)
        services[pid] = NodeService(name=_name(command), command=command, environment=environment)
    return services


def _name(command: list[str]) -> str:
    """The name of the program; for Python, the name of its script or module."""
    program = Path(command[0]).name
    scripts = [word for word in command[1:] if word.endswith(".py") or word.startswith("ray.")]
    return program if program in {GCS, RAYLET} or not scripts else Path(scripts[0]).name


def _last_lines(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-LAST_LINES:])[-2000:]
