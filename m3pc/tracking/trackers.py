"""Metrics of a run in MLflow or Weights & Biases too, beside those in its folder.

Their calls may block for minutes, and W&B ends with the process that loaded it whether that process
can wait or not. So each runs in a process of its own (`tracker_process.py`), and a thread talks to
it: whatever goes wrong there costs a line in the log, and never the run.
"""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Protocol

from m3pc.config.overrides import flatten
from m3pc.config.schema import Config
from m3pc.core.subprocesses import python_path
from m3pc.types import InputError

NONE = ("", "none")
PACKAGES = ("mlflow", "wandb")  # by the names of their tools
LOG = "tracking.log"  # what the tool itself has to say
ROOM = 1000  # reports that wait; what comes after them is lost
CLOSE_SECONDS, END_SECONDS = 30.0, 5.0
# Unless the environment says otherwise: nobody else is told, and an absent server is soon known.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "WANDB_ERROR_REPORTING": "false",
}

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Killable(Tracker, Protocol):
    def kill(self) -> None:
        """From another thread: whatever is being waited for ends at once, with an error."""


def tracker(name: str, run_folder: Path, config: Config) -> Tracker | None:
    """What a RunLog tells its numbers; nothing starts before the first. None where none is asked
    for."""
    require(name)
    if name in NONE:
        return None
    return BackgroundTracker(ExternalTracker(name, run_folder.resolve(), flatten(config)))


def require(name: str) -> None:
    """Before a run is made: what its tracker needs is there."""
    if name in NONE:
        return
    if name not in PACKAGES:
        raise InputError(f"--track is {name!r}; give one of {', '.join(PACKAGES)}, none")
    if find_spec(name) is None:
        raise InputError(f"{name} is not installed; pip install 'm3pc[{name}]'")


class BackgroundTracker:
    """Lets a tracker work in a thread: nobody waits for it, and its errors end here."""

    def __init__(
        self, inner: Killable, *, room: int = ROOM, close_seconds: float = CLOSE_SECONDS
    ) -> None:
        self._inner, self._room, self._close_seconds = inner, room, close_seconds
        self._waiting: SimpleQueue[tuple[dict[str, float], int] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._given_up = Event()
        self._dropped = self._failed = 0  # reports: each is counted by one thread alone
        self._failing = self._full = False

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        if not finite:
            return
        if self._thread is None:
            # A daemon: one that hangs does not keep the process from ending.
            self._thread = Thread(target=self._work, name="tracker", daemon=True)
            self._thread.start()
        full = self._waiting.qsize() >= self._room
        if full:
            self._dropped += 1
            if not self._full:
                log.warning("event=tracking-lost reason=%d reports wait already", self._room)
        else:
            self._waiting.put((finite, step))
        self._full = full

    def close(self) -> None:
        """Send what waits, for so many seconds."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            self._given_up.set()
            self._inner.kill()
            self._thread.join(END_SECONDS)
        lost = self._dropped + self._failed + max(0, self._waiting.qsize() - 1)
        if lost:
            log.warning("event=tracking-lost reports=%d", lost)

    def _work(self) -> None:
        while not self._given_up.is_set() and (report := self._waiting.get()) is not None:
            try:
                self._inner.log(*report)
            except Exception as error:  # any: nothing that a tracker does may end a run
                self._failed += 1
                if not self._failing:
                    log.warning("event=tracking-lost reason=%s", error)
                self._failing = True
            else:
                if self._failing:
                    log.info("event=tracking-back lost=%d", self._failed)
                self._failing = False
        try:
            self._inner.close()
        except Exception as error:
            log.warning("event=tracking-lost reason=%s", error)


class ExternalTracker:
    """A tracker in a process of its own: an order is a line to it, and each has an answer."""

    def __init__(self, name: str, folder: Path, params: Mapping[str, object]) -> None:
        self._about = {"name": name, "folder": str(folder), "params": dict(params)}
        self._log = folder / LOG
        self._process: subprocess.Popen[str] | None = None
        self._killed, self._lock = False, Lock()

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._ask({"numbers": dict(numbers), "step": step})

    def close(self) -> None:
        """Let it finish; then it is gone."""
        process = self._process
        if process is None:
            return
        try:
            if not self._killed and process.poll() is None:
                self._ask({})
                process.wait(END_SECONDS)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what could not be written any more
                    if pipe is not None:
                        pipe.close()

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def _ask(self, order: Mapping[str, Any]) -> None:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it ended, so there is no answer either
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise ChildProcessError(f"the tracker's process ended; {self._log} may say why")
        if reason := answer.strip():
            raise ChildProcessError(reason)

    def _started(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._killed:
                raise ChildProcessError("the tracker did not answer in time")
            if self._process is None:
                self._process = self._start()
            return self._process

    def _start(self) -> subprocess.Popen[str]:
        """In a session of its own: Ctrl-C is for the run, and nothing can ask at the terminal."""
        with self._log.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "m3pc.tracking.tracker_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=_environment(),
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(self._about) + "\n")
        return process


def _environment() -> dict[str, str]:
    return ENVIRONMENT | os.environ | {"PYTHONPATH": python_path()}
