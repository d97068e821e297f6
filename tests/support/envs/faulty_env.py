"""An environment that misbehaves: by chance, or at a step that its arguments name."""

import ctypes
import time
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box

FAULTY = "tests.support.envs.faulty_env:toy/Faulty-v0"  # gymnasium imports the module
LIMIT = 20  # steps of an episode

BAD: dict[str, Callable[[list[float]], tuple[Any, Any, bool]]] = {
    "nan-state": lambda state: ([state[0], np.nan], 1.0, False),
    "inf-state": lambda state: ([state[0], np.inf], 1.0, False),
    "huge-state": lambda state: ([state[0], 1e30], 1.0, False),
    "nan-reward": lambda state: (state, np.nan, False),
    "huge-reward": lambda state: (state, -1e9, False),
    "long-state": lambda state: ([*state, 0.0], 1.0, False),
    "flat-state": lambda state: ([state], 1.0, False),
    "text-state": lambda state: ("state", 1.0, False),
    "text-reward": lambda state: (state, "much", False),
    "two-rewards": lambda state: (state, [1.0, 2.0], False),
}
REASONS = {kind: "nan" if kind.split("-")[0] in ("nan", "inf", "huge") else "shape" for kind in BAD}


class Faulty(gymnasium.Env[Any, Any]):
    """The state is (number of steps ever taken by any, steps of this episode); the reward 1."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)
    faults: ClassVar[dict[str, int]] = {}  # how often each kind happened, in this process
    steps: ClassVar[int] = 0
    made: ClassVar[int] = 0
    open: ClassVar[int] = 0

    def __init__(
        self,
        *,
        chance: float = 0.0,
        at: int = -1,
        kind: str = "crash",
        on_reset: bool = False,
        only_env: int = -1,
        makes: int = 10**9,
        hang: str = "",
    ) -> None:
        """A fault with this chance a step, or always at step `at` (of environment `only_env`)."""
        if Faulty.made >= makes:
            raise RuntimeError("no more of them")
        self.number, Faulty.made = Faulty.made, Faulty.made + 1
        Faulty.open += 1
        self._chance, self._at, self._kind = chance, at, kind
        self._on_reset, self._only, self._hang = on_reset, only_env, hang
        self._rng = np.random.default_rng([self.number, 7])
        self._done = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._done = 0
        if self._on_reset and self._now():
            return self._misbehave()[0], {}
        return self._state(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        Faulty.steps += 1
        self._done += 1
        if not self._on_reset and self._now():
            observation, reward, terminated = self._misbehave()
            return observation, reward, terminated, False, {}
        return self._state(), 1.0, False, False, {}

    def close(self) -> None:
        if self._hang == "close" and self._only in (-1, self.number):
            time.sleep(60)
        Faulty.open -= 1

    def _now(self) -> bool:
        if self._only not in (-1, self.number):
            return False
        return self._done == self._at or self._rng.random() < self._chance

    def _misbehave(self) -> tuple[Any, Any, bool]:
        if self._hang == "sleep":
            time.sleep(60)
        if self._hang == "gil":  # a PyDLL keeps the interpreter's lock during its calls
            ctypes.PyDLL(None).sleep(60)
        kinds = [*BAD, "crash"]
        kind = kinds[self._rng.integers(len(kinds))] if self._kind == "any" else self._kind
        Faulty.faults[kind] = Faulty.faults.get(kind, 0) + 1
        if kind == "crash":
            raise RuntimeError("something broke")
        return BAD[kind](self._state())

    def _state(self) -> list[float]:
        return [float(self.number), float(self._done)]


def forget() -> None:
    """Reset all counts."""
    Faulty.faults.clear()
    Faulty.steps = Faulty.made = Faulty.open = 0


gymnasium.register(
    "toy/Faulty-v0",
    entry_point="tests.support.envs.faulty_env:Faulty",
    max_episode_steps=LIMIT,
    disable_env_checker=True,
)
