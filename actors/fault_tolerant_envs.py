"""Environments that may fail one by one. E environments, S state, A action.

An exception, a number that is not finite or far too large, a wrong shape: each ends the episode of
that environment only, which is made anew. What it gave is dropped: nothing unsound is handed out.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Final, Literal, Protocol

import numpy as np

from actors.vector_rollout import BoolArray, Stepped
from m3pc.envs.registry import Env, step_limit
from m3pc.telemetry.catalogue import ENV_FAULTS
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Floats

Fault = Literal["crash", "nan", "shape"]

LARGEST: Final = 1e6  # of a state or reward; a store takes no larger reward
MAKE_TRIES: Final = 3
MOST_IN_A_ROW: Final = 10  # faults of one environment without a sound step between them
UNSTABLE: Final = slice(4, 8)  # MuJoCo's warnings of bad positions, velocities, forces, controls

log = logging.getLogger(__name__)


class BrokenEnvError(RuntimeError):
    """An environment that cannot be made, or that fails whenever it is made anew."""


class StepWatchdog(Protocol):
    """Told when foreign code begins and ends, so that one that hangs is noticed."""

    def arm(self, slot: int) -> None: ...
    def disarm(self) -> None: ...


class NoStepWatchdog:
    def arm(self, slot: int) -> None: ...
    def disarm(self) -> None: ...


class _FaultError(Exception):
    def __init__(self, reason: Fault, detail: str) -> None:
        super().__init__(detail)
        self.reason: Fault = reason


class FaultTolerantEnvs:
    """`Envs` made by `make`, stepped one after the other."""

    def __init__(
        self,
        make: Callable[[], Env],
        count: int,
        *,
        recorder: Recorder,
        watch: StepWatchdog | None = None,
        first: int = 0,
    ) -> None:
        """`first`: number of the first environment in logs, where several vectors are watched."""
        self._make, self._recorder, self._first = make, recorder, first
        self._watch: StepWatchdog = watch or NoStepWatchdog()
        self._in_a_row = [0] * count
        self._envs: dict[int, Env] = {}  # by slot
        self.count = count
        try:
            for slot in range(count):
                self._envs[slot] = self._made(slot)
            with self._watched(0):
                self.state_size, self.action_size = _sizes(self._envs[0])
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: Sequence[int | None], mask: BoolArray) -> tuple[Floats, BoolArray]:
        states = np.zeros((self.count, self.state_size), np.float32)
        faulty = np.zeros(self.count, np.bool_)
        for slot in np.flatnonzero(mask).tolist():
            try:
                states[slot] = self._reset_one(slot, seeds[slot])
            except _FaultError as fault:
                faulty[slot] = True
                self._renew(slot, fault)
        return states, faulty

    def step(self, actions: Floats) -> Stepped:
        states = np.zeros((self.count, self.state_size), np.float32)
        rewards = np.zeros(self.count)
        terminated, truncated, faulty = np.zeros((3, self.count), np.bool_)
        for slot in range(self.count):
            try:
                found = self._step_one(slot, actions[slot])
                states[slot], rewards[slot], terminated[slot], truncated[slot] = found
                self._in_a_row[slot] = 0
            except _FaultError as fault:
                faulty[slot] = True
                self._renew(slot, fault)
        return Stepped(states, rewards, terminated, truncated, faulty)

    def close(self) -> None:
        while self._envs:
            slot, env = self._envs.popitem()
            self._close(slot, env)

    def _close(self, slot: int, env: Env) -> None:
        with suppress(Exception), self._watched(slot), closing(env):
            pass

    def _reset_one(self, slot: int, seed: int | None) -> Floats:
        found = self._foreign(slot, lambda env: env.reset(seed=seed))
        try:
            observation, _ = found
        except (TypeError, ValueError):
            raise _FaultError("shape", f"reset gave {_brief(found)}") from None
        return self._state(observation)

    def _step_one(self, slot: int, action: Floats) -> tuple[Floats, float, bool, bool]:
        found, unstable = self._foreign(slot, lambda env: (env.step(action), _unstable(env)))
        try:
            observation, reward, terminated, truncated, _ = found
            ends = bool(terminated), bool(truncated)
        except (TypeError, ValueError):
            raise _FaultError("shape", f"step gave {_brief(found)}") from None
        state = self._state(observation)
        value = float(_numbers(reward, 1, "reward").item())
        if unstable:
            raise _FaultError("nan", "the physics became unstable")
        return state, value, *ends

    def _state(self, observation: object) -> Floats:
        numbers = _numbers(observation, self.state_size, "state")
        if numbers.ndim != 1:
            raise _FaultError("shape", f"a state has shape {list(numbers.shape)}")
        return numbers.astype(np.float32)

    def _foreign(self, slot: int, call: Callable[[Env], Any]) -> Any:
        """Other people's code: it raises what it likes."""
        try:
            with self._watched(slot):
                return call(self._envs[slot])
        except Exception as error:
            raise _FaultError("crash", _brief(error)) from error

    @contextmanager
    def _watched(self, slot: int) -> Iterator[None]:
        self._watch.arm(self._first + slot)
        try:
            yield
        finally:
            self._watch.disarm()

    def _renew(self, slot: int, fault: _FaultError) -> None:
        self._recorder.add(ENV_FAULTS, label=fault.reason)
        self._in_a_row[slot] += 1
        number = self._first + slot
        log.warning("event=env-fault env=%d reason=%s detail=%s", number, fault.reason, fault)
        if self._in_a_row[slot] > MOST_IN_A_ROW:
            raise BrokenEnvError(
                f"environment {number} failed {self._in_a_row[slot]} times without a sound step "
                f"between, at last by {fault.reason}: {fault}; mend it or give another"
            ) from fault
        self._close(slot, self._envs.pop(slot))
        self._envs[slot] = self._made(slot)

    def _made(self, slot: int) -> Env:
        for tries_left in reversed(range(MAKE_TRIES)):
            try:
                with self._watched(slot):
                    return self._make()
            except Exception as error:
                if not tries_left:
                    raise BrokenEnvError(
                        f"environment {self._first + slot} could not be made {MAKE_TRIES} times, "
                        f"at last: {_brief(error)}"
                    ) from error
        raise AssertionError


def _sizes(env: Env) -> tuple[int, int]:
    """Of a state and an action. InputError where episodes may never end."""
    step_limit(env)
    states, actions = env.observation_space.shape, env.action_space.shape
    assert states is not None and actions is not None
    return int(states[0]), int(actions[0])


def _numbers(found: object, size: int, what: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        numbers = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        raise _FaultError("shape", f"a {what} is {_brief(found)}, no numbers") from None
    if numbers.size != size:
        raise _FaultError("shape", f"a {what} has shape {list(numbers.shape)}, expected {size}")
    if not (np.abs(numbers) <= LARGEST).all():  # nor is NaN
        raise _FaultError("nan", f"a {what} is not finite, or beyond {LARGEST:g}")
    return numbers


def _unstable(env: Env) -> bool:
    """MuJoCo only counts these, and goes on from a reset of its own."""
    warning = getattr(getattr(env.unwrapped, "data", None), "warning", None)
    number = getattr(warning, "number", None)
    return number is not None and bool(np.any(number[UNSTABLE]))


def _brief(found: object) -> str:
    return f"{type(found).__name__}: {str(found)[:200]}"
