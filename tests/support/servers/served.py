"""A server of a tiny model: inside of this process, or as the command that users start."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from m3pc.config.schema import Config
from m3pc.core.subprocesses import python_path
from m3pc.model import checkpoint
from m3pc.model.weights import Weights
from m3pc.robot_client import Planner
from m3pc.serving.app import application
from m3pc.serving.recording import EpisodeRecording
from m3pc.serving.service_spec import ServiceSpec
from m3pc.serving.session_service import SessionService
from m3pc.types import Version
from planner.policy import Policy
from planner.server.service import PlannerService
from tests.support.models.small_weights import tiny_config, tiny_weights

STATES, ACTIONS = 3, 1  # as of Pendulum-v1
ENV = "Pendulum-v1"
TOKEN = "secret-of-the-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
PATIENCE = 120.0  # seconds; the machine may be busy
LONG_MS = 60_000.0  # a deadline that nothing misses


def config(**changes: object) -> Config:
    small: dict[str, Any] = {"planner__mode": "m", "planner__candidates": 16, "model__width": 8}
    return tiny_config(**small | {"fleet__batch_wait": 0.0} | changes)


def weights(number: int = 7, *, states: int = STATES, settings: Config | None = None) -> Weights:
    """Other numbers in each version."""
    made = tiny_weights(settings or config(), seed=number, states=states, actions=ACTIONS, env=ENV)
    return replace(made, version=Version(epoch=0, number=number).packed)


def write_checkpoint(path: Path, found: Weights, *, critic_updates: int = 3) -> Path:
    progress = {"model_updates": 7, "critic_updates": critic_updates}
    checkpoint.write(path, found, {}, progress, replace=path.exists())
    return path


class Clock:
    """That a test moves."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


class Inside:
    """The application without sockets. Requests have a token unless they say otherwise."""

    def __init__(
        self,
        *,
        record: Path | None = None,
        source: Path | None = None,
        clock: Any = time.monotonic,
        token: str | None = TOKEN,
        metrics_token: str | None = None,
        paced: bool = False,
        settings: Config | None = None,
        **house: Any,
    ) -> None:
        found = weights(settings=settings)
        given = {"critic": True, "deadline": LONG_MS / 1000, "most": 4, "idle": 60.0}
        self.house = ServiceSpec.of(Policy(found), **given | house)
        self.recording = EpisodeRecording(record, found) if record else None
        self.service = PlannerService(found, paced=paced, clock=clock)
        self.robots = SessionService(
            self.service, self.house, recording=self.recording, source=source, clock=clock
        )
        self.app = application(
            self.robots, self.house, info={}, token=token, metrics_token=metrics_token
        )
        self.client = TestClient(self.app, "http://127.0.0.1", headers=HEADERS)
        self.client.__enter__()  # one event loop for all requests

    def opened(self, **terms: Any) -> str:
        response = self.client.post("/v1/sessions", json=terms)
        assert response.status_code == 201, response.text
        return str(response.json()["session"])

    def act(self, session: str, step: int, reward: float | None = None, **more: Any) -> Any:
        """Where step k is at (k, k + 0.5, -k)."""
        message = {"step": step, "observation": [step, step + 0.5, -step]} | more
        message |= {} if reward is None else {"reward": reward}
        return self.client.post(f"/v1/sessions/{session}/act", json=message)

    def end(self, session: str, step: int, reward: float | None = None, **more: Any) -> Any:
        message = {"step": step, "observation": [9, 9, 9], **more}
        message |= {} if reward is None else {"reward": reward}
        return self.client.post(f"/v1/sessions/{session}/end", json=message)

    def run(self, action: Callable[[], Awaitable[None] | None]) -> None:
        """In the application's event loop."""
        assert self.client.portal is not None
        self.client.portal.call(action)

    def walk(self, session: str, steps: int) -> list[Any]:
        """The first steps, each of which brings its number as a reward."""
        found = [self.act(session, k, k - 1.0 if k else None) for k in range(steps)]
        assert [each.status_code for each in found] == [200] * steps, found[-1].text
        return [each.json() for each in found]

    def close(self) -> None:
        """As a server that stops."""
        self.run(self.robots.close)
        self.client.__exit__()
        self.service.close()
        if self.recording is not None:
            self.recording.close()


@contextmanager
def inside(**options: Any) -> Iterator[Inside]:
    found = Inside(**options)
    try:
        yield found
    finally:
        found.close()


class Outside:
    """The command, in a process of its own."""

    def __init__(self, path: Path, token: Path | None, *options: str | Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.address, self.token_file = f"http://127.0.0.1:{self.port}", token
        entry = ["--token-file", str(token)] if token else ["--insecure-without-token"]
        command = [sys.executable, "-P", "-m", "m3pc", "serve", str(path), *entry]
        command += ["--port", str(self.port), *map(str, options)]
        # A pipe that nobody reads would fill up.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed when it has stopped
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": python_path()}, stderr=self._log
        )
        self._told = b""
        self._planners: list[Planner] = []

    @property
    def errors(self) -> bytes:
        """What it logged so far; all of it once it has stopped."""
        if self._log.closed:
            return self._told
        return os.pread(self._log.fileno(), 1 << 24, 0)

    @property
    def token(self) -> str | None:
        return self.token_file.read_text() if self.token_file else None

    def planner(self, **options: Any) -> Planner:
        """Closed with the server."""
        made = Planner(self.address, self.token, timeout=PATIENCE, **options)
        self._planners.append(made)
        return made

    def wait_until_ready(self) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"it did not start: {self.stop(signal.SIGKILL)}, {self.errors!r}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        for planner in self._planners:
            planner.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._told = self.errors
        self._log.close()
        return code


@contextmanager
def outside(path: Path, token: Path | None, *options: str | Path) -> Iterator[Outside]:
    found = Outside(path, token, *options)
    try:
        found.wait_until_ready()
        yield found
    finally:
        found.stop()


def problem(response: Any, status: int) -> dict[str, Any]:
    """What went wrong, in the one shape that it has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    told: dict[str, Any] = response.json()
    assert set(told) == {"title", "status", "detail", "where", "expected_step"}
    assert told["status"] == status
    assert "Traceback" not in told["detail"]
    return told
