"""Environments of which each may fail alone. E environments, S state, A action.

An exception, a wrong shape and a number that is not finite or beyond MAX_VALUE are faults. A fault
ends the episode of its environment only; the environment is closed and made again. The values of a
faulty step are dropped, so callers see valid numbers only.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Final, Literal, Protocol

import numpy as np

from actors.vector_rollout import VectorStep
from m3pc.envs.registry import Env, env_sizes, step_limit
from m3pc.telemetry.catalogue import ENV_FAULTS
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Booleans, Doubles, Floats

Fault = Literal["crash", "nan", "shape"]

MAX_VALUE: Final = 1e6  # limit of states and rewards; a store takes no larger reward
MAKE_ATTEMPTS: Final = 3
MAX_FAULTS_IN_A_ROW: Final = 10  # per environment; a valid step resets the count
UNSTABLE: Final = slice(4, 8)  # MuJoCo's warnings: bad position, velocity, acceleration, control

log = logging.getLogger(__name__)


class BrokenEnvError(RuntimeError):
    """An environment cannot be made, or keeps failing although it is made again."""


class StepWatchdog(Protocol):
    """Notices an environment that hangs. Callers arm it before each call into an environment."""

    def arm(self, slot: int) -> None: ...
    def disarm(self) -> None: ...


class _FaultError(Exception):
    def __init__(self, reason: Fault, detail: str) -> None:
        super().__init__(detail)
        self.reason: Fault = reason


class FaultTolerantEnvs:
    """Steps its environments one after the other, for a `VectorRollout`."""

    def __init__(
        self,
        make: Callable[[], Env],
        count: int,
        *,
        recorder: Recorder,
        watchdog: StepWatchdog | None = None,
        first: int = 0,
    ) -> None:
        """Logs and the watchdog number the environments from `first` on."""
        self._make, self._recorder, self._first = make, recorder, first
        self._watchdog = watchdog
        self._faults_in_a_row = [0] * count
        self._envs: dict[int, Env] = {}  # by slot
        self.count = count
        try:
            for slot in range(count):
                self._envs[slot] = self._make_one(slot)
            with self._watched(0):
                step_limit(self._envs[0])  # refuses environments whose episodes may never end
                self.state_size, self.action_size = env_sizes(self._envs[0])
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: Sequence[int | None], mask: Booleans) -> tuple[Floats, Booleans]:
        states = np.zeros((self.count, self.state_size), np.float32)
        faulty = np.zeros(self.count, np.bool_)
        for slot in np.flatnonzero(mask).tolist():
            try:
                states[slot] = self._reset_one(slot, seeds[slot])
            except _FaultError as fault:
                faulty[slot] = True
                self._replace(slot, fault)
        return states, faulty

    def step(self, actions: Floats) -> VectorStep:
        states = np.zeros((self.count, self.state_size), np.float32)
        rewards = np.zeros(self.count)
        terminated, truncated, faulty = np.zeros((3, self.count), np.bool_)
        for slot in range(self.count):
            try:
                outcome = self._step_one(slot, actions[slot])
                states[slot], rewards[slot], terminated[slot], truncated[slot] = outcome
                self._faults_in_a_row[slot] = 0
            except _FaultError as fault:
                faulty[slot] = True
                self._replace(slot, fault)
        return VectorStep(states, rewards, terminated, truncated, faulty)

    def close(self) -> None:
        while self._envs:
            slot, env = self._envs.popitem()
            self._close(slot, env)

    def _close(self, slot: int, env: Env) -> None:
        with suppress(Exception), self._watched(slot), closing(env):
            pass

    def _reset_one(self, slot: int, seed: int | None) -> Floats:
        outcome = self._call(slot, lambda env: env.reset(seed=seed))
        try:
            observation, _ = outcome
        except (TypeError, ValueError):
            raise _FaultError("shape", f"reset gave {_brief(outcome)}") from None
        return self._state(observation)

    def _step_one(self, slot: int, action: Floats) -> tuple[Floats, float, bool, bool]:
        outcome, unstable = self._call(slot, lambda env: (env.step(action), _is_unstable(env)))
        try:
            observation, reward, terminated, truncated, _ = outcome
            ends = bool(terminated), bool(truncated)
        except (TypeError, ValueError):
            raise _FaultError("shape", f"step gave {_brief(outcome)}") from None
        state = self._state(observation)
        value = float(_checked(reward, 1, "reward").item())
        if unstable:
            raise _FaultError("nan", "the physics became unstable")
        return state, value, *ends

    def _state(self, observation: object) -> Floats:
        numbers = _checked(observation, self.state_size, "state")
        if numbers.ndim != 1:
            raise _FaultError("shape", f"a state has shape {list(numbers.shape)}")
        return numbers.astype(np.float32)

    def _call(self, slot: int, function: Callable[[Env], Any]) -> Any:
        """Call into an environment. It is foreign code, so any exception is a fault."""
        try:
            with self._watched(slot):
                return function(self._envs[slot])
        except Exception as error:
            raise _FaultError("crash", _brief(error)) from error

    @contextmanager
    def _watched(self, slot: int) -> Iterator[None]:
        if self._watchdog is None:
            yield
            return
        self._watchdog.arm(self._first + slot)
        try:
            yield
        finally:
            self._watchdog.disarm()

    def _replace(self, slot: int, fault: _FaultError) -> None:
        """Count the fault, and make the environment again."""
        self._recorder.add(ENV_FAULTS, label=fault.reason)
        self._faults_in_a_row[slot] += 1
        number = self._first + slot
        log.warning("event=env-fault env=%d reason=%s detail=%s", number, fault.reason, fault)
        if self._faults_in_a_row[slot] > MAX_FAULTS_IN_A_ROW:
            raise BrokenEnvError(
                f"environment {number} failed {self._faults_in_a_row[slot]} times without a "
                f"valid step in between, last by {fault.reason}: {fault}; fix it or use another"
            ) from fault
        self._close(slot, self._envs.pop(slot))
        self._envs[slot] = self._make_one(slot)

    def _make_one(self, slot: int) -> Env:
        for attempts_left in reversed(range(MAKE_ATTEMPTS)):
            try:
                with self._watched(slot):
                    return self._make()
            except Exception as error:
                if not attempts_left:
                    raise BrokenEnvError(
                        f"environment {self._first + slot} could not be made {MAKE_ATTEMPTS} "
                        f"times, at last: {_brief(error)}"
                    ) from error
        raise AssertionError


def _checked(value: object, size: int, name: str) -> Doubles:
    """The value as `size` finite numbers, or a fault."""
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise _FaultError("shape", f"a {name} is {_brief(value)}, no numbers") from None
    if numbers.size != size:
        raise _FaultError("shape", f"a {name} has shape {list(numbers.shape)}, expected {size}")
    if not (np.abs(numbers) <= MAX_VALUE).all():  # false for NaN, too
        raise _FaultError("nan", f"a {name} is not finite, or beyond {MAX_VALUE:g}")
    return numbers


def _is_unstable(env: Env) -> bool:
    """Whether MuJoCo met an unstable state. It does not raise, but resets and counts a warning."""
    warning = getattr(getattr(env.unwrapped, "data", None), "warning", None)
    number = getattr(warning, "number", None)
    return number is not None and bool(np.any(number[UNSTABLE]))


def _brief(value: object) -> str:
    return f"{type(value).__name__}: {str(value)[:200]}"
