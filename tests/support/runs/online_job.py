"""An online run as its users have it: a command in a process of its own, watched from outside."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from m3pc.online.delivery_audit import DeliveryAudit, audit_deliveries
from m3pc.online.run_control import read_status
from tests.support.episodes.shared_data import ROOT
from tests.support.servers.waiting import eventually

PATIENCE = 180.0  # seconds: only a failure waits so long
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Job:
    """The process of `m3pc resume RUN`, with further options and environment variables."""

    def __init__(self, run: Path, *words: str, **environment: str) -> None:
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-m", "m3pc", "resume", str(run), *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **ONE_THREAD, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def status(self) -> dict[str, Any]:
        """Its last status; empty while that is of an earlier process of the run."""
        last = read_status(self.run)
        return last if last.get("pid") == self.process.pid else {}

    @property
    def steps(self) -> int:
        return int(self.status.get("steps", 0))

    def pid(self, name: str) -> int | None:
        """Of a process of the run that is up: store, learner, planner-0, evaluator, actor-0, ..."""
        row = self.processes.get(name, {})
        return row["pid"] if row.get("state") in ("up", "running") else None

    @property
    def processes(self) -> dict[str, dict[str, Any]]:
        return {process["name"]: process for process in self.status.get("processes", ())}

    def restarts(self, name: str) -> int:
        return int(self.processes.get(name, {}).get("restarts", 0))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for the condition; fail with the run's output if it ends or takes too long."""
        ended = eventually(lambda: self.process.poll() is not None or condition(), PATIENCE)
        if not condition():
            status = self.status
            code = self.process.poll()
            self.end()
            raise AssertionError(f"in time: {ended}, exit code: {code}, {status}\n{self.output}")

    def until_up(self, actors: int) -> None:
        self.until(lambda: self.status.get("running") == actors and self.steps > 0)

    def advance(self, steps: int) -> None:
        """Wait until it has stored so many more steps."""
        goal = self.steps + steps
        self.until(lambda: self.steps >= goal)

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        self.until(lambda: self.pid(name) is not None)
        pid = self.pid(name)
        assert pid is not None
        os.kill(pid, number)
        return pid

    def until_replaced(self, name: str, before: int) -> None:
        self.until(lambda: self.pid(name) not in (None, before))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> DeliveryAudit:
        """Stop it by a signal and check that every acknowledged episode is in its store."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.output
        assert "stopped" in self.output
        deliveries = audit_deliveries(self.run)
        assert deliveries.sound, deliveries
        return deliveries

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        self._read(PATIENCE)
        assert self.process.returncode is not None
        return self.process.returncode

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._read(PATIENCE)

    output = ""

    def _read(self, seconds: float) -> None:
        try:
            self.output += self.process.communicate(timeout=seconds)[0] or ""
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.output += self.process.communicate(timeout=30)[0] or ""
            raise AssertionError(f"it did not end: {self.output[-2000:]}") from None
        except ValueError:  # read before
            pass


@contextmanager
def job(run: Path, *words: str, **environment: str) -> Iterator[Job]:
    started = Job(run, *words, **environment)
    try:
        yield started
    finally:
        started.end()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
