"""Follows published weights and verifies each version before it is used."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from m3pc.config.schema import BACKWARD
from m3pc.core.backoff import Backoff
from m3pc.model.weights import MAX_FILE, NumbersError, TensorsError, Weights, from_bytes
from m3pc.telemetry.catalogue import COORDINATOR_FAILURES, WEIGHTS_REJECTED
from m3pc.telemetry.recorder import Recorder
from m3pc.types import (
    CoordinatorUnavailableError,
    InputError,
    PlanRequest,
    Pointer,
    Version,
    Window,
)
from planner.policy import Policy

log = logging.getLogger(__name__)

POINTER = "weights"
POLL_SECONDS = 1.0  # longest wait of one poll for a newer version
BACKOFF = Backoff(first=1.0, longest=60.0)  # pause before a rejected version is tried again
STOP_SECONDS = 10.0

LoadFailure = Literal["missing", "size", "hash", "format", "shape", "finite", "canary", "env"]


class RejectedError(Exception):
    """Published weights that must not be used, with the reason as a metric label."""

    def __init__(self, reason: LoadFailure, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedVersion:
    pointer: Pointer
    failures: int  # consecutive failures
    retry_at: float  # time on the loader's clock


class PointerSource(Protocol):
    """Where newer weights are announced: a Coordinator, or a folder that is polled."""

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None: ...


class WeightsLoader:
    """Follows a run's pointer and calls `on_load` with each newer policy, never an older one."""

    def __init__(
        self,
        policy: Policy,
        on_load: Callable[[Policy], None],
        coordinator: PointerSource,
        folder: Path,
        *,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._on_load = policy, on_load
        self._coordinator, self._folder = coordinator, folder
        self._recorder, self._clock = recorder, clock
        self._rejected: RejectedVersion | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = STOP_SECONDS) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def poll(self, seconds: float = POLL_SECONDS) -> None:
        """Wait up to `seconds` for a newer version, and load it if it is valid."""
        since = self._version
        if self._rejected is not None:
            since = max(since, self._rejected.pointer.version)
        try:
            pointer = self._coordinator.watch(POINTER, since, seconds)
        except CoordinatorUnavailableError as error:
            self._recorder.add(COORDINATOR_FAILURES)
            log.warning("event=coordinator-unavailable reason=%r", str(error))
            self._stop.wait(seconds)
            return
        if pointer is None and self._rejected and self._clock() >= self._rejected.retry_at:
            pointer = self._rejected.pointer
        if pointer is not None:
            self.maybe_load(pointer)

    def maybe_load(self, pointer: Pointer) -> bool:
        """Load a version if it is newer and valid, and return whether it was."""
        if pointer.version <= self._version:
            return False
        try:
            policy = validated_successor(read_published(self._folder, pointer), self._policy)
        except RejectedError as error:
            self._reject(pointer, error)
            return False
        self._on_load(policy)
        self._policy, self._rejected = policy, None
        log.info("event=weights-taken epoch=%d number=%d", *_pair(pointer.version))
        return True

    @property
    def _version(self) -> Version:
        return Version.unpacked(self._policy.weights.version)

    def _reject(self, pointer: Pointer, error: RejectedError) -> None:
        last, failures = self._rejected, 1
        if last is not None and last.pointer == pointer:
            failures = last.failures + 1
        pause = BACKOFF.pause(failures)
        self._rejected = RejectedVersion(
            pointer=pointer, failures=failures, retry_at=self._clock() + pause
        )
        self._recorder.add(WEIGHTS_REJECTED, label=error.reason)
        log.warning(
            "event=weights-rejected epoch=%d number=%d reason=%s detail=%r pause_s=%g",
            *_pair(pointer.version),
            error.reason,
            error.message,
            pause,
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.poll()
            except Exception:  # the planner goes on with its current weights
                log.exception("event=loader-failed")
                self._stop.wait(POLL_SECONDS)


def read_published(folder: Path, pointer: Pointer) -> Weights:
    """The weights that a pointer names; a RejectedError if they are damaged."""
    try:
        weights = from_bytes(_verified_content(folder, pointer))
    except TensorsError as error:
        raise RejectedError("shape", str(error)) from None
    except NumbersError as error:
        raise RejectedError("finite", str(error)) from None
    except InputError as error:
        raise RejectedError("format", str(error)) from None
    version = Version.unpacked(weights.version)
    if version != pointer.version:
        raise RejectedError("format", f"the file says {version}, expected {pointer.version}")
    return weights


def canary(policy: Policy) -> None:
    """Refuse a policy without a sensible decision for a typical window."""
    mode = policy.config.planner.mode
    if mode in BACKWARD:
        mode = "rcbc"
    try:
        decision = policy.answer([PlanRequest(window=typical_window(policy), mode=mode)])[0]
    except (RuntimeError, ValueError) as error:
        raise RejectedError("canary", f"{type(error).__name__}: {error}") from error
    arrays = [decision.actions]
    if mode != "rcbc":
        arrays += [decision.utilities, decision.utility_std]
    if not all(np.isfinite(x).all() for x in arrays) or (abs(decision.actions) > 1).any():
        raise RejectedError("canary", f"it answers {[x.tolist() for x in arrays]}")


def typical_window(policy: Policy) -> Window:
    """Two windows filled with the data's mean state: at an episode's start, and later on."""
    config, weights = policy.config, policy.weights
    mean = weights.tensors["normaliser.states.mean"].numpy()
    now = np.asarray([0, config.context], np.int64)
    return Window(
        states=np.broadcast_to(mean, (2, config.model.window, len(mean))).copy(),
        actions=np.zeros((2, config.model.window, weights.action_size), np.float32),
        now=now,
        steps=now,
        seeds=np.zeros(2, np.int64),
    )


def validated_successor(weights: Weights, current: Policy) -> Policy:
    """A policy that can replace `current`; a RejectedError if sizes, settings or environment do not
    fit, or if it fails the canary."""
    old = current.weights
    sizes = [(w.state_size, w.action_size, w.max_episode_steps) for w in (weights, old)]
    if sizes[0] != sizes[1]:
        raise RejectedError("shape", f"states, actions, step limit {sizes[0]}, not {sizes[1]}")
    if weights.env and old.env and weights.env != old.env:
        raise RejectedError("env", f"they were trained for {weights.env}, not for {old.env}")
    try:
        policy = Policy(weights, current.config)
    except InputError as error:
        raise RejectedError("shape", str(error)) from None
    canary(policy)
    return policy


def _verified_content(folder: Path, pointer: Pointer) -> bytes:
    path = folder / pointer.path
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise RejectedError("missing", f"{pointer.path} is no file of the run")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != pointer.size or size > MAX_FILE:
                raise RejectedError("size", f"{size} bytes, expected {pointer.size}")
            content = file.read(size)
    except OSError as error:
        raise RejectedError("missing", f"{pointer.path}: {error}") from None
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != pointer.sha256:
        raise RejectedError("hash", f"SHA-256 {sha256}, expected {pointer.sha256}")
    return content


def _pair(version: Version) -> tuple[int, int]:
    return version.epoch, version.number
