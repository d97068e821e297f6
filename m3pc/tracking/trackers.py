"""Send a run's metrics to MLflow or Weights & Biases, in addition to the run's folder.

Calls of these tools may block for minutes, and W&B finishes only when the process that loaded it
exits, however long that takes. So the tool runs in its own process (`tracker_process.py`), and a
thread talks to that process. A failure there is logged and never stops the run.
"""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol

from m3pc.config.overrides import flatten
from m3pc.config.schema import Config
from m3pc.core.subprocesses import python_path
from m3pc.types import InputError

NONE = ("", "none")
PACKAGES = ("mlflow", "wandb")  # also the tools' names
LOG = "tracking.log"  # in the run's folder: the tool's own output
ROOM = 1000  # reports that may wait; further reports are lost
CLOSE_SECONDS, END_SECONDS = 30.0, 5.0
# Defaults: no telemetry to third parties, and short waits for an absent server.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "WANDB_ERROR_REPORTING": "false",
}

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers after `step` updates or environment steps."""

    def close(self) -> None:
        """Finish the tool's run."""


class KillableTracker(Tracker, Protocol):
    def kill(self) -> None:
        """Called by another thread: make a call that blocks fail at once."""


def make_tracker(name: str, run_folder: Path, config: Config) -> Tracker | None:
    """The tracker for a run's RunLog; None if `name` is none. It starts at the first report."""
    require_tracker(name)
    if name in NONE:
        return None
    return BackgroundTracker(partial(ExternalTracker, name, run_folder.resolve(), flatten(config)))


def require_tracker(name: str) -> None:
    """Refuse a tracker that does not exist or is not installed, before a run is made."""
    if name in NONE:
        return
    if name not in PACKAGES:
        raise InputError(f"--track is {name!r}; give one of {', '.join(PACKAGES)}, none")
    if find_spec(name) is None:
        raise InputError(f"{name} is not installed; pip install 'm3pc[{name}]'")


class BackgroundTracker:
    """Passes reports to a tracker in a thread: only `close` waits, and no error reaches the run."""

    def __init__(
        self,
        start: Callable[[], KillableTracker],
        *,
        room: int = ROOM,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """`start` makes the tracker at the first report."""
        self._start, self._room, self._close_seconds = start, room, close_seconds
        self._tracker: KillableTracker | None = None
        self._reports: SimpleQueue[tuple[dict[str, float], int] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._given_up = Event()
        self._dropped = self.failed = 0  # reports that the run's or the tracker's thread lost
        self._failing = self._full = False

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        if not finite:
            return
        if self._thread is None:
            # A daemon thread that hangs does not keep the process from ending.
            self._thread = Thread(target=self._work, name="tracker", daemon=True)
            self._thread.start()
        full = self._reports.qsize() >= self._room
        if full:
            self._dropped += 1
            if not self._full:
                log.warning("event=tracking-lost reason=%d reports wait already", self._room)
        else:
            self._reports.put((finite, step))
        self._full = full

    def close(self) -> None:
        """Pass on the waiting reports; give up after `close_seconds`."""
        if self._thread is None:
            return
        self._reports.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            self._given_up.set()
            if self._tracker is not None:
                self._tracker.kill()
            self._thread.join(END_SECONDS)
        lost = self._dropped + self.failed + max(0, self._reports.qsize() - 1)
        if lost:
            log.warning("event=tracking-lost reports=%d", lost)

    def _work(self) -> None:
        while not self._given_up.is_set() and (report := self._reports.get()) is not None:
            try:
                if self._tracker is None:
                    self._tracker = self._start()
                if self._given_up.is_set():  # `close` may have run before `_tracker` was set
                    raise TimeoutError("the tracker did not start in time")
                self._tracker.log(*report)
            except Exception as error:  # no failure of a tracker may end the run
                self.failed += 1
                if not self._failing:
                    log.warning("event=tracking-lost reason=%s", error)
                self._failing = True
            else:
                if self._failing:
                    log.info("event=tracking-back lost=%d", self.failed)
                self._failing = False
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                log.warning("event=tracking-lost reason=%s", error)


class ExternalTracker:
    """A tracker in its own process, which answers each line of input with a line."""

    def __init__(self, name: str, folder: Path, params: Mapping[str, object]) -> None:
        self._log, self._killed = folder / LOG, False
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "m3pc.tracking.tracker_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=ENVIRONMENT | os.environ | {"PYTHONPATH": python_path()},
                start_new_session=True,  # no Ctrl-C, and no terminal for prompts
                text=True,
                encoding="utf-8",
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._write({"name": name, "folder": str(folder), "params": dict(params)})

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._request({"numbers": dict(numbers), "step": step})

    def close(self) -> None:
        try:
            if not self._killed and self._process.poll() is None:
                self._request({})
                self._process.wait(END_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            for pipe in (self._requests, self._answers):
                with suppress(OSError):  # the process ended before it read everything
                    pipe.close()

    def kill(self) -> None:
        self._killed = True
        self._process.kill()

    def _request(self, content: Mapping[str, Any]) -> None:
        self._write(content)
        answer = self._answers.readline()
        if not answer:
            raise ChildProcessError(f"the tracker's process ended; {self._log} may say why")
        if reason := answer.strip():
            raise ChildProcessError(reason)

    def _write(self, content: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the process ended; reading its answer reports that
            self._requests.write(json.dumps(content) + "\n")
            self._requests.flush()
