"""Many environments in a few processes, for simulators that cost more than the planner does.

E environments, S state, A action. Numbers pass through shared memory, of which each process writes
its own rows; pipes carry one byte a command and one an answer.
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
from numpy.typing import NDArray

from m3pc.envs.registry import Env, make
from m3pc.types import Floats, InputError

PATIENCE = 300.0  # seconds that one command may take, the making of all environments included
JOIN = 10.0  # seconds to end
DONE, RESET, STEP = b"d", b"r", b"s"
LONGEST_WORD = 10_000  # bytes of what a process says when it fails
NO_SEED = -1
SPAWN = multiprocessing.get_context("spawn")  # threads and GL contexts do not survive a fork


class Pipe(Protocol):
    """What is used of multiprocessing's: bytes, never objects."""

    def send_bytes(self, word: bytes, /) -> None: ...
    def recv_bytes(self, most: int, /) -> bytes: ...
    def poll(self, seconds: float, /) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedBuffers:
    """The shared rows."""

    states: Any  # float32 [E, S]
    actions: Any  # float32 [E, A]
    rewards: Any  # float64 [E]
    terminated: Any  # bool [E]
    truncated: Any  # bool [E]
    chosen: Any  # bool [E] that a reset is for
    seeds: Any  # int64 [E]


SpaceShapes = Mapping[str, tuple[tuple[int, ...], str]]


def _shapes(count: int, states: int, actions: int) -> SpaceShapes:
    return {
        "states": ((count, states), "f4"),
        "actions": ((count, actions), "f4"),
        "rewards": ((count,), "f8"),
        "terminated": ((count,), "?"),
        "truncated": ((count,), "?"),
        "chosen": ((count,), "?"),
        "seeds": ((count,), "i8"),
    }


def _board(memory: Mapping[str, Any], shapes: SpaceShapes) -> _SharedBuffers:
    return _SharedBuffers(
        **{
            name: np.frombuffer(memory[name], kind).reshape(shape)
            for name, (shape, kind) in shapes.items()
        }
    )


class SubprocVectorEnv(VectorEnv[Floats, Floats, Any]):
    """`count` environments shared out over `processes`; the numbers are those of `make_vector`.

    None resets itself. One that is reset without a seed sleeps until it is given one: its steps
    would cost as much as any, and nobody looks at them.
    """

    def __init__(self, env_id: str, count: int, *, processes: int, **kwargs: Any) -> None:
        self._pipes: list[Pipe] = []  # first: `close` needs them, also where nothing can be made
        self._processes: list[SpawnProcess] = []
        with closing(make(env_id, **kwargs)) as env:
            self.spec, self.metadata = env.spec, {**env.metadata}
            self.single_observation_space = env.observation_space
            self.single_action_space = env.action_space
        self.metadata["autoreset_mode"] = AutoresetMode.DISABLED
        self.num_envs, self._env_id = count, env_id
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        assert self.single_observation_space.shape and self.single_action_space.shape
        sizes = self.single_observation_space.shape[0], self.single_action_space.shape[0]
        shapes = _shapes(count, *sizes)
        memory = {
            name: SPAWN.RawArray("b", int(np.prod(shape)) * np.dtype(kind).itemsize)
            for name, (shape, kind) in shapes.items()
        }
        self._board = _board(memory, shapes)
        try:
            for slots in np.array_split(np.arange(count), min(processes, count)):
                ours, theirs = SPAWN.Pipe()
                child = SPAWN.Process(
                    target=_host,
                    args=(theirs, memory, shapes, slots.tolist(), env_id, kwargs),
                    daemon=True,
                )
                child.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(child)
            self._hear()
        except BaseException:
            self.close()
            raise

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Floats, dict[str, Any]]:
        """`seed`: one for each; `options`: as for `make_vector`."""
        assert isinstance(seed, Sequence), "give a seed, or None, for each"
        self._board.chosen[:] = (options or {}).get("reset_mask", True)
        self._board.seeds[:] = [NO_SEED if one is None else one for one in seed]
        self._order(RESET)
        return self._board.states.copy(), {}

    def step(
        self, actions: Floats
    ) -> tuple[Floats, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        board = self._board
        board.actions[:] = actions
        self._order(STEP)
        ends = board.terminated.copy(), board.truncated.copy()
        return board.states.copy(), board.rewards.copy(), *ends, {}

    def close_extras(self, **kwargs: Any) -> None:
        for pipe in self._pipes:
            pipe.close()  # which is how they are told
        for child in self._processes:
            child.join(JOIN)
            if child.is_alive():
                child.kill()
                child.join(JOIN)

    def _order(self, command: bytes) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # what became of it is told when it is heard
                pipe.send_bytes(command)
        self._hear()

    def _hear(self) -> None:
        for pipe in self._pipes:
            word = b"it gives no answer"
            try:
                if pipe.poll(PATIENCE):
                    word = pipe.recv_bytes(LONGEST_WORD)
            except (EOFError, OSError):
                word = b"it ended"
            if word != DONE:
                told = word.decode(errors="replace")
                raise InputError(f"{self._env_id} in a process of its own: {told}")


def _host(
    pipe: Pipe,
    memory: Mapping[str, Any],
    shapes: SpaceShapes,
    slots: Sequence[int],
    env_id: str,
    kwargs: Mapping[str, Any],
) -> None:
    """A process: does what it is told until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    board = _board(memory, shapes)
    try:
        envs = {slot: make(env_id, **kwargs) for slot in slots}
        awake: set[int] = set()
        pipe.send_bytes(DONE)
        while command := _command(pipe):
            COMMANDS[command](envs, awake, board)
            pipe.send_bytes(DONE)
    except Exception as error:  # an environment is foreign code: it raises what it likes
        word = f"{type(error).__name__}: {error}".encode()[:LONGEST_WORD]
        with contextlib.suppress(OSError):
            pipe.send_bytes(word)


def _command(pipe: Pipe) -> bytes:
    """The next one; nothing when the parent closed the pipe, or is no more."""
    try:
        return pipe.recv_bytes(1)
    except (EOFError, OSError):
        return b""


EnvList = Mapping[int, Env]


def _reset(envs: EnvList, awake: set[int], board: _SharedBuffers) -> None:
    for slot, env in envs.items():
        if not board.chosen[slot]:
            continue
        awake.discard(slot)
        if board.seeds[slot] != NO_SEED:
            board.states[slot] = env.reset(seed=int(board.seeds[slot]))[0]
            awake.add(slot)


def _step(envs: EnvList, awake: set[int], board: _SharedBuffers) -> None:
    for slot, env in envs.items():
        terminated = truncated = False
        if slot in awake:
            state, reward, terminated, truncated, _ = env.step(board.actions[slot].copy())
            board.states[slot], board.rewards[slot] = state, reward
        board.terminated[slot], board.truncated[slot] = terminated, truncated


COMMANDS: Mapping[bytes, Callable[[EnvList, set[int], _SharedBuffers], None]] = {
    RESET: _reset,
    STEP: _step,
}
