"""Newer weights, followed and verified: nothing answers that was not looked at first."""

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
from m3pc.model.weights import LARGEST_FILE, NumbersError, TensorsError, Weights, from_bytes
from m3pc.telemetry.catalogue import COORDINATOR_DOWN, WEIGHTS_REJECTED
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
LOOK = 1.0  # seconds that one look for something newer lasts at most
LEAST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before what was rejected is tried again
STOP_SECONDS = 10.0

LoadFailure = Literal["missing", "size", "hash", "format", "shape", "finite", "canary", "env"]


class RejectedError(Exception):
    def __init__(self, reason: LoadFailure, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedVersion:
    pointer: Pointer
    pause: float
    until: float  # on the loader's clock


class PointerSource(Protocol):
    """What tells of newer weights: a Coordinator, or a folder that is looked at."""

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None: ...


class WeightsLoader:
    """Follows a run's pointer and hands on each newer policy; never an older one."""

    def __init__(
        self,
        first: Policy,
        take: Callable[[Policy], None],
        coordinator: PointerSource,
        folder: Path,
        *,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._take = first, take
        self._coordinator, self._folder = coordinator, folder
        self._recorder, self._clock = recorder, clock
        self._rejected: RejectedVersion | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = STOP_SECONDS) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def poll(self, seconds: float = LOOK) -> None:
        """Wait that long for something newer, and take it if it is sound."""
        since = self._version
        if self._rejected is not None:
            since = max(since, self._rejected.pointer.version)
        try:
            pointer = self._coordinator.watch(POINTER, since, seconds)
        except CoordinatorUnavailableError as error:
            self._recorder.add(COORDINATOR_DOWN)
            log.warning("event=coordinator-unavailable reason=%r", str(error))
            self._stop.wait(seconds)
            return
        if pointer is None and self._rejected and self._clock() >= self._rejected.until:
            pointer = self._rejected.pointer
        if pointer is not None:
            self.offer(pointer)

    def offer(self, pointer: Pointer) -> bool:
        """Whether it was newer and sound; then it answers from now on."""
        if pointer.version <= self._version:
            return False
        try:
            policy = successor(read(self._folder, pointer), self._policy)
        except RejectedError as error:
            self._reject(pointer, error)
            return False
        self._take(policy)
        self._policy, self._rejected = policy, None
        log.info("event=weights-taken epoch=%d number=%d", *_pair(pointer.version))
        return True

    @property
    def _version(self) -> Version:
        return Version.unpacked(self._policy.weights.version)

    def _reject(self, pointer: Pointer, error: RejectedError) -> None:
        last, pause = self._rejected, LEAST_PAUSE
        if last is not None and last.pointer == pointer:
            pause = min(2 * last.pause, LONGEST_PAUSE)
        self._rejected = RejectedVersion(pointer=pointer, pause=pause, until=self._clock() + pause)
        self._recorder.add(WEIGHTS_REJECTED, label=error.reason)
        log.warning(
            "event=weights-rejected epoch=%d number=%d reason=%s detail=%r pause_s=%g",
            *_pair(pointer.version),
            error.reason,
            error.message,
            pause,
        )

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self.poll()
            except Exception:  # whatever it is: the planner goes on with what it has
                log.exception("event=loader-failed")
                self._stop.wait(LOOK)


def read(folder: Path, pointer: Pointer) -> Weights:
    """The weights that a pointer names, verified; or a RejectedError."""
    weights = _parsed(_content(folder, pointer))
    found = Version.unpacked(weights.version)
    if found != pointer.version:
        raise RejectedError("format", f"the file says {found}, expected {pointer.version}")
    return weights


def canary(policy: Policy) -> None:
    """Refuse a policy that has no sensible answer to an ordinary question."""
    mode = policy.config.planner.mode
    if mode in BACKWARD:
        mode = "rcbc"
    try:
        found = policy.answer([PlanRequest(window=ordinary(policy), mode=mode)])[0]
    except (RuntimeError, ValueError) as error:
        raise RejectedError("canary", f"{type(error).__name__}: {error}") from error
    numbers = (
        [found.actions] if mode == "rcbc" else [found.actions, found.utilities, found.utility_std]
    )
    if not all(np.isfinite(each).all() for each in numbers) or (abs(found.actions) > 1).any():
        raise RejectedError("canary", f"it answers {[each.tolist() for each in numbers]}")


def ordinary(policy: Policy) -> Window:
    """The data's mean state, all through a window, at an episode's start and later on."""
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


def successor(weights: Weights, before: Policy) -> Policy:
    """These weights in the place of others, or a RejectedError where they do not fit it."""
    old = before.weights
    sizes = [(w.state_size, w.action_size, w.max_episode_steps) for w in (weights, old)]
    if sizes[0] != sizes[1]:
        raise RejectedError("shape", f"states, actions, step limit {sizes[0]}, not {sizes[1]}")
    if weights.env and old.env and weights.env != old.env:
        raise RejectedError("env", f"they were trained for {weights.env}, not for {old.env}")
    try:
        policy = Policy(weights, before.config)
    except InputError as error:
        raise RejectedError("shape", str(error)) from None
    canary(policy)
    return policy


def _content(folder: Path, pointer: Pointer) -> bytes:
    path = folder / pointer.path
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise RejectedError("missing", f"{pointer.path} is no file of the run")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != pointer.size or size > LARGEST_FILE:
                raise RejectedError("size", f"{size} bytes, expected {pointer.size}")
            content = file.read(size)
    except OSError as error:
        raise RejectedError("missing", f"{pointer.path}: {error}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != pointer.sha256:
        raise RejectedError("hash", f"SHA-256 {found}, expected {pointer.sha256}")
    return content


def _parsed(content: bytes) -> Weights:
    try:
        return from_bytes(content)
    except TensorsError as error:
        raise RejectedError("shape", str(error)) from None
    except NumbersError as error:
        raise RejectedError("finite", str(error)) from None
    except InputError as error:
        raise RejectedError("format", str(error)) from None


def _pair(version: Version) -> tuple[int, int]:
    return version.epoch, version.number
