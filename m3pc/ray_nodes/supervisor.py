"""A Ray node is kept alive until it is told to stop; then all of it ends, and nothing else.

process       when it ends
raylet        the node is lost, for Ray takes none back: a head ends (69), another joins anew
gcs_server    is started again where Redis has its memory; without, the cluster is lost (69)
the others    are started again
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

from m3pc.core.exit_codes import CONTROL_LOST, OK, TERMINATED
from m3pc.core.restart_policy import RestartPolicy
from m3pc.core.signals import handled
from m3pc.ray_nodes import processes
from m3pc.ray_nodes.gcs_storage import remember
from m3pc.ray_nodes.node import MARK, RAY, Node
from m3pc.tracking.run_lock import locked
from m3pc.types import InputError

PAUSE = 0.1  # seconds between two looks
HEAD_TRIES = 3
START_SECONDS, END_SECONDS = 120.0, 5.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a node joins again
STEADY = 60.0  # seconds up, after which an end is a first one
GCS, RAYLET = "gcs_server", "raylet"
START_LOG, LAST_LINES = "start.log", 15

log = logging.getLogger(__name__)


def keep(node: Node, up: Callable[[], None]) -> int:
    """A node of this folder for as long as nobody says stop: the exit code. `up` is called whenever
    it has started."""
    with locked(node.folder):
        end_leftovers(node.folder)
        node.ports.require_free(node.ip, head=node.is_head)
        shutil.rmtree(node.folder / RAY, ignore_errors=True)  # what an earlier one left
        if node.store is None:
            return NodeWatch(node, up).run()
        node.store.check()
        remember(node.store, node.folder)
        try:
            return NodeWatch(node, up).run()
        finally:
            node.store.forget()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeService:
    """A process of the node, as it was started."""

    name: str
    command: list[str]
    environment: dict[str, str]

    def start(self) -> int:
        quiet = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
        return os.posix_spawn(
            self.command[0], self.command, self.environment, file_actions=quiet, setsid=True
        )


class NodeWatch:
    def __init__(
        self, node: Node, up: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node, self._up, self._clock = node, up, clock
        self._signals = 0
        self._services: dict[int, NodeService] = {}
        self._due: list[tuple[float, NodeService]] = []
        self._restarts: defaultdict[str, RestartPolicy] = defaultdict(RestartPolicy)

    def run(self) -> int:
        """Until a signal (0) or until the node is lost for good (69)."""
        processes.adopt_orphans()
        with handled(self._signalled):
            try:
                return self._head() if self._node.is_head else self._other()
            finally:
                self._end()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            processes.send(processes.descendants([os.getpid()]), signal.SIGKILL)
            os._exit(TERMINATED)

    def _head(self) -> int:
        """Started in several tries: Ray gives its parts half a minute, also on a busy machine."""
        for left in reversed(range(HEAD_TRIES)):
            failure = self._start()
            if not failure or self._signals:
                break
            if not left:
                raise InputError(f"the head did not start: {failure}; its logs: {self._logs}")
            log.warning("event=start-again tries=%d reason=%s", left, failure)
            self._end()
            if self._node.store:
                self._node.store.forget()
        return self._watch()

    @property
    def _logs(self) -> Path:
        return self._node.folder / RAY / "session_latest" / "logs"

    def _other(self) -> int:
        """Join, as often as it takes: the head may be away or not there yet."""
        pause = FIRST_PAUSE
        while not self._signals:
            failure = self._unreachable() or self._start()
            began = self._clock()
            if (not failure and self._watch() == OK) or self._signals:
                return OK
            if failure:
                log.warning("event=not-joined head=%s reason=%s", self._node.joins, failure)
            self._end()
            pause = FIRST_PAUSE if self._clock() - began > STEADY else pause
            log.warning("event=joins-again head=%s in=%.0fs", self._node.joins, pause)
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return OK

    # Starting

    def _start(self) -> str:
        """Why it did not start; nothing if it did."""
        path = self._node.folder / START_LOG
        with path.open("wb") as file:
            process = subprocess.Popen(
                self._node.command(),
                env=self._node.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for this process alone
            )
        until = self._clock() + START_SECONDS
        while process.poll() is None:
            if self._signals or self._clock() > until:
                process.kill()
                process.wait()
                return "it was told to stop" if self._signals else f"not in {START_SECONDS:.0f} s"
            time.sleep(PAUSE)
        if process.returncode:
            return f"ray start ended with code {process.returncode}: {_last_lines(path)}"
        self._services, self._due = _services(), []
        names = {service.name for service in self._services.values()}
        if missing := {RAYLET, *([GCS] if self._node.is_head else [])} - names:
            return f"{' and '.join(sorted(missing))} ended at once"
        log.info("event=node-up address=%s processes=%d", self._node.address, len(self._services))
        self._up()
        return ""

    def _unreachable(self) -> str:
        """Ray itself would try for half a minute."""
        host, _, port = str(self._node.joins).rpartition(":")
        try:
            socket.create_connection((host, int(port)), END_SECONDS).close()
        except OSError as error:
            return f"no answer: {error}"
        return ""

    # Watching

    def _watch(self) -> int:
        while not self._signals:
            for pid, code in processes.reap().items():
                service = self._services.pop(pid, None)
                if service is not None and self._is_lost(service, pid, code):
                    return CONTROL_LOST
            now = self._clock()
            for due in [one for one in self._due if one[0] <= now]:
                self._due.remove(due)
                self._again(due[1])
            time.sleep(PAUSE)
        return OK

    def _is_lost(self, service: NodeService, pid: int, code: int) -> bool:
        log.warning("event=process-ended name=%s pid=%d code=%d", service.name, pid, code)
        if service.name == RAYLET:
            log.error("event=node-lost reason=raylet-ended code=%d", code)
            return True
        if service.name == GCS and self._node.store is None:
            log.error(
                "event=cluster-lost reason=gcs-ended code=%d memory=none "
                "remedy=--redis-keeps-a-cluster-through-this",
                code,
            )
            return True
        restarts = self._restarts[service.name]
        again = restarts.ended(self._clock())
        if again is not None:
            self._due.append((again, service))
            return False
        log.error(
            "event=given-up name=%s ends=%d", service.name, self._restarts[service.name].count
        )
        return service.name == GCS

    def _again(self, service: NodeService) -> None:
        pid = service.start()
        self._services[pid] = service
        log.warning("event=process-started-again name=%s pid=%d", service.name, pid)

    def _sleep(self, seconds: float) -> None:
        until = self._clock() + seconds
        while self._clock() < until and not self._signals:
            time.sleep(PAUSE)

    def _end(self) -> None:
        """The raylet first: it tells the cluster, and ends its workers."""
        raylets = [pid for pid, service in self._services.items() if service.name == RAYLET]
        processes.end_below(raylets, END_SECONDS)
        self._services = {}


def end_leftovers(folder: Path) -> None:
    """Of a node whose watch was killed: they hold its ports. Call it under the folder's lock."""
    left = processes.marked(MARK, str(folder)) - {os.getpid()}
    if left:
        log.warning("event=leftovers-ended folder=%s processes=%d", folder, len(left))
        processes.send(left, signal.SIGKILL)
        until = time.monotonic() + END_SECONDS
        while processes.marked(MARK, str(folder)) and time.monotonic() < until:
            time.sleep(PAUSE)


def _services() -> dict[int, NodeService]:
    found = {}
    for pid in processes.children():
        command = processes.command_of(pid)
        environment = processes.environment_of(pid)
        found[pid] = NodeService(name=_name(command), command=command, environment=environment)
    return found


def _name(command: list[str]) -> str:
    """Of the program; of its script or module where it is Python's."""
    program = Path(command[0]).name
    scripts = [word for word in command[1:] if word.endswith(".py") or word.startswith("ray.")]
    return program if program in {GCS, RAYLET} or not scripts else Path(scripts[0]).name


def _last_lines(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-LAST_LINES:])[-2000:]
