"""Many environments in a few processes, for simulators that are slower than the planner.

E environments, S state, A action. Arrays are in shared memory, where each process writes its own
rows. Pipes carry one byte per command and, back, one byte or an error message.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from m3pc.envs.registry import Env, env_sizes, make
from m3pc.types import Booleans, Doubles, Floats, InputError

COMMAND_SECONDS = 300.0  # limit for one command, and for making all environments
JOIN_SECONDS = 10.0
DONE, RESET, STEP = b"d", b"r", b"s"
MAX_REPLY_BYTES = 10_000  # longest error message
NO_SEED = -1
SPAWN = multiprocessing.get_context("spawn")  # threads and GL contexts do not survive a fork


class Pipe(Protocol):
    """The methods of a multiprocessing pipe that are used here: bytes, never pickled objects."""

    def send_bytes(self, message: bytes, /) -> None: ...
    def recv_bytes(self, max_bytes: int, /) -> bytes: ...
    def poll(self, seconds: float, /) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedBuffers:
    """The shared memory as arrays, with one row per environment."""

    states: Any  # float32 [E, S]
    actions: Any  # float32 [E, A]
    rewards: Any  # float64 [E]
    terminated: Any  # bool [E]
    truncated: Any  # bool [E]
    reset_mask: Any  # bool [E] environments to reset
    seeds: Any  # int64 [E]


SpaceShapes = Mapping[str, tuple[tuple[int, ...], str]]


def _shapes(count: int, states: int, actions: int) -> SpaceShapes:
    return {
        "states": ((count, states), "f4"),
        "actions": ((count, actions), "f4"),
        "rewards": ((count,), "f8"),
        "terminated": ((count,), "?"),
        "truncated": ((count,), "?"),
        "reset_mask": ((count,), "?"),
        "seeds": ((count,), "i8"),
    }


def _shared_buffers(memory: Mapping[str, Any], shapes: SpaceShapes) -> _SharedBuffers:
    return _SharedBuffers(
        **{
            name: np.frombuffer(memory[name], kind).reshape(shape)
            for name, (shape, kind) in shapes.items()
        }
    )


class SubprocVectorEnv(VectorEnv[Floats, Floats, Any]):
    """`count` environments in several processes, with the same results as `make_vector`.

    No environment resets itself. An environment that is reset without a seed is not stepped until
    a reset gives it one, because no caller uses its steps.
    """

    def __init__(self, env_id: str, count: int, *, processes: int, **kwargs: Any) -> None:
        self._pipes: list[Pipe] = []  # set first: `close` needs them if `make` fails
        self._processes: list[SpawnProcess] = []
        with closing(make(env_id, **kwargs)) as env:
            self.spec, self.metadata = env.spec, {**env.metadata}
            self.single_observation_space = env.observation_space
            self.single_action_space = env.action_space
        self.metadata["autoreset_mode"] = AutoresetMode.DISABLED
        self.num_envs, self._env_id = count, env_id
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        shapes = _shapes(count, *env_sizes(self))
        memory = {
            name: SPAWN.RawArray("b", int(np.prod(shape)) * np.dtype(kind).itemsize)
            for name, (shape, kind) in shapes.items()
        }
        self._buffers = _shared_buffers(memory, shapes)
        try:
            for slots in np.array_split(np.arange(count), min(processes, count)):
                ours, theirs = SPAWN.Pipe()
                child = SPAWN.Process(
                    target=_serve,
                    args=(theirs, memory, shapes, slots.tolist(), env_id, kwargs),
                    daemon=True,
                )
                child.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(child)
            self._await_replies()
        except BaseException:
            self.close()
            raise

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Floats, dict[str, Any]]:
        """`seed`: an int or None for each; `options`: as for `make_vector`."""
        assert isinstance(seed, Sequence), "give a seed, or None, for each"
        self._buffers.reset_mask[:] = (options or {}).get("reset_mask", True)
        self._buffers.seeds[:] = [NO_SEED if number is None else number for number in seed]
        self._command(RESET)
        return self._buffers.states.copy(), {}

    def step(self, actions: Floats) -> tuple[Floats, Doubles, Booleans, Booleans, dict[str, Any]]:
        buffers = self._buffers
        buffers.actions[:] = actions
        self._command(STEP)
        ends = buffers.terminated.copy(), buffers.truncated.copy()
        return buffers.states.copy(), buffers.rewards.copy(), *ends, {}

    def close_extras(self, **kwargs: Any) -> None:
        for pipe in self._pipes:
            pipe.close()  # the process ends when its pipe is closed
        for child in self._processes:
            child.join(JOIN_SECONDS)
            if child.is_alive():
                child.kill()
                child.join(JOIN_SECONDS)

    def _command(self, command: bytes) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # `_await_replies` reports the failure
                pipe.send_bytes(command)
        self._await_replies()

    def _await_replies(self) -> None:
        for pipe in self._pipes:
            reply = b"it gives no answer"
            try:
                if pipe.poll(COMMAND_SECONDS):
                    reply = pipe.recv_bytes(MAX_REPLY_BYTES)
            except (EOFError, OSError):
                reply = b"it ended"
            if reply != DONE:
                reason = reply.decode(errors="replace")
                raise InputError(f"{self._env_id} in a process of its own: {reason}")


def _serve(
    pipe: Pipe,
    memory: Mapping[str, Any],
    shapes: SpaceShapes,
    slots: Sequence[int],
    env_id: str,
    kwargs: Mapping[str, Any],
) -> None:
    """Main function of a process: carry out commands until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    buffers = _shared_buffers(memory, shapes)
    try:
        envs = {slot: make(env_id, **kwargs) for slot in slots}
        awake: set[int] = set()
        pipe.send_bytes(DONE)
        while command := _next_command(pipe):
            COMMANDS[command](envs, awake, buffers)
            pipe.send_bytes(DONE)
    except Exception as error:  # an environment is foreign code: it may raise anything
        message = f"{type(error).__name__}: {error}".encode()[:MAX_REPLY_BYTES]
        with contextlib.suppress(OSError):
            pipe.send_bytes(message)


def _next_command(pipe: Pipe) -> bytes:
    """The next command; empty when the parent closed the pipe or ended."""
    try:
        return pipe.recv_bytes(1)
    except (EOFError, OSError):
        return b""


EnvList = Mapping[int, Env]


def _reset(envs: EnvList, awake: set[int], buffers: _SharedBuffers) -> None:
    for slot, env in envs.items():
        if not buffers.reset_mask[slot]:
            continue
        awake.discard(slot)
        if buffers.seeds[slot] != NO_SEED:
            buffers.states[slot] = env.reset(seed=int(buffers.seeds[slot]))[0]
            awake.add(slot)


def _step(envs: EnvList, awake: set[int], buffers: _SharedBuffers) -> None:
    for slot, env in envs.items():
        terminated = truncated = False
        if slot in awake:
            state, reward, terminated, truncated, _ = env.step(buffers.actions[slot].copy())
            buffers.states[slot], buffers.rewards[slot] = state, reward
        buffers.terminated[slot], buffers.truncated[slot] = terminated, truncated


COMMANDS: Mapping[bytes, Callable[[EnvList, set[int], _SharedBuffers], None]] = {
    RESET: _reset,
    STEP: _step,
}
