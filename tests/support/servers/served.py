"""A server of a tiny model: in this process, or as the command that users start."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
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
from m3pc.serving.sessions import StepAnswer
from m3pc.types import Decision, Floats, Version
from planner.policy import Policy
from planner.server.service import PlannerService
from tests.support.models.small_weights import tiny_config, tiny_weights

STATES, ACTIONS = 3, 1  # as of Pendulum-v1
ENV = "Pendulum-v1"
TOKEN = "secret-of-the-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
PATIENCE = 120.0  # seconds; the machine may be busy
LONG_MS = 60_000.0  # a deadline that is never missed


def config(**changes: object) -> Config:
    small: dict[str, Any] = {"planner__mode": "m", "planner__candidates": 16, "model__width": 8}
    return tiny_config(**small | {"fleet__batch_wait": 0.0} | changes)


def weights(number: int = 7, *, states: int = STATES, settings: Config | None = None) -> Weights:
    """Each version has other numbers."""
    tiny = tiny_weights(settings or config(), seed=number, states=states, actions=ACTIONS, env=ENV)
    return replace(tiny, version=Version(epoch=0, number=number).packed)


def write_checkpoint(path: Path, trained: Weights, *, critic_updates: int = 3) -> Path:
    progress = {"model_updates": 7, "critic_updates": critic_updates}
    checkpoint.write(path, trained, {}, progress, replace=path.exists())
    return path


class Clock:
    """Advanced by the test."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


class InProcessServer:
    """The application without sockets. Requests carry the token unless they say otherwise."""

    def __init__(
        self,
        *,
        record: Path | None = None,
        open_recording: Callable[[Path, Weights], EpisodeRecording] = EpisodeRecording,
        planner_class: type[PlannerService] = PlannerService,
        source: Path | None = None,
        clock: Any = time.monotonic,
        token: str | None = TOKEN,
        metrics_token: str | None = None,
        deadline_aware: bool = False,
        settings: Config | None = None,
        service_options: Mapping[str, Any] = MappingProxyType({}),
        **spec: Any,
    ) -> None:
        """`spec`: fields of the ServiceSpec; `service_options`: of the SessionService."""
        served = weights(settings=settings)
        defaults = {"critic_trained": True, "deadline": LONG_MS / 1000}
        defaults |= {"max_sessions": 4, "idle_seconds": 60.0}
        self.recording = open_recording(record, served) if record else None
        self.planner = planner_class(served, deadline_aware=deadline_aware, clock=clock)
        self.service = SessionService(
            self.planner,
            ServiceSpec.from_policy(Policy(served), **defaults | spec),
            recording=self.recording,
            source=source,
            clock=clock,
            **service_options,
        )
        self.app = application(self.service, info={}, token=token, metrics_token=metrics_token)
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
        answers = [self.act(session, k, k - 1.0 if k else None) for k in range(steps)]
        assert [answer.status_code for answer in answers] == [200] * steps, answers[-1].text
        return [answer.json() for answer in answers]

    def close(self) -> None:
        """As a server that stops."""
        self.stop()
        self.client.__exit__()
        self.planner.close()

    def stop(self) -> int:
        """End all sessions and close the store; the number of episodes that were lost."""
        self.run(self.service.close)
        recording, self.recording = self.recording, None
        return 0 if recording is None else recording.close()


@contextmanager
def in_process(**options: Any) -> Iterator[InProcessServer]:
    server = InProcessServer(**options)
    try:
        yield server
    finally:
        server.close()


class ServerProcess:
    """The command in a process of its own."""

    def __init__(self, path: Path, token: Path | None, *options: str | Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.address, self.token_file = f"http://127.0.0.1:{self.port}", token
        entry = ["--token-file", str(token)] if token else ["--insecure-without-token"]
        command = [sys.executable, "-P", "-m", "m3pc", "serve", str(path), *entry]
        command += ["--port", str(self.port), *map(str, options)]
        # Not a pipe, which would fill up unread.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed when it has stopped
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": python_path()}, stderr=self._log
        )
        self._final_log = b""
        self._planners: list[Planner] = []

    @property
    def errors(self) -> bytes:
        """Its log so far; the complete log once it has stopped."""
        if self._log.closed:
            return self._final_log
        return os.pread(self._log.fileno(), 1 << 24, 0)

    @property
    def token(self) -> str | None:
        return self.token_file.read_text() if self.token_file else None

    def planner(self, **options: Any) -> Planner:
        """Closed with the server."""
        planner = Planner(self.address, self.token, timeout=PATIENCE, **options)
        self._planners.append(planner)
        return planner

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
        self._final_log = self.errors
        self._log.close()
        return code


@contextmanager
def as_process(path: Path, token: Path | None, *options: str | Path) -> Iterator[ServerProcess]:
    server = ServerProcess(path, token, *options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def problem(response: Any, status: int) -> dict[str, Any]:
    """The problem document of a response."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert set(document) == {"title", "status", "detail", "where", "expected_step"}
    assert document["status"] == status
    assert "Traceback" not in document["detail"]
    return document


def step_answer(step: int, *, version: int = 7, utility: float = 0.5) -> StepAnswer:
    """An answer with the action step / 10 and the target return 100 + step."""

    def row(value: float) -> Floats:
        return np.asarray([value], np.float32)

    decision = Decision(
        actions=np.asarray([[step / 10]], np.float32),
        target_returns=row(100.0 + step),
        utilities=row(utility),
        effective_candidates=row(2.0),
        utility_std=row(1.0),
        version=version,
    )
    return StepAnswer(
        decision=decision, candidates=8, hurried=False, seconds=0.01, deadline=0.05, late=False
    )
