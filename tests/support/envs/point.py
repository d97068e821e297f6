"""A point on a line, pushed left or right: better the nearer it stays to 0.

Its id names its module, so that any process can make it.
"""

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box

POINT, HORIZON = "tests.support.envs.point:toy/Point-v0", 30


class Point(gymnasium.Env[Any, Any]):
    """The state is (place, speed); an episode ends when the point leaves [-2, 2]."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._speed = self.np_random.uniform(-1, 1, 2)
        return self._state(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._speed += 0.2 * float(action[0])
        self._place += 0.2 * self._speed
        return self._state(), 1 - abs(self._place), abs(self._place) > 2, False, {}

    def _state(self) -> Any:
        return np.array([self._place, self._speed])


HARM: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(600),
    "crash": lambda: ctypes.string_at(0),
}


class UnrulyPoint(Point):
    """Hangs or crashes its process (M3PC_HARM) at the step M3PC_HARM_AFTER of that process."""

    taken = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        UnrulyPoint.taken += 1
        if UnrulyPoint.taken == int(os.environ["M3PC_HARM_AFTER"]):
            HARM[os.environ["M3PC_HARM"]]()
        return super().step(action)


class GreedyPoint(Point):
    """The first process that makes the file M3PC_GREEDY allocates up to 8 GiB."""

    max_bytes, block_bytes = 8 << 30, 128 << 20  # bytes
    kept: ClassVar[list[Any]] = []
    greedy: bool | None = None

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if GreedyPoint.greedy is None:
            with suppress(FileExistsError):
                os.close(os.open(os.environ["M3PC_GREEDY"], os.O_CREAT | os.O_EXCL))
                GreedyPoint.greedy = True
            GreedyPoint.greedy = bool(GreedyPoint.greedy)
        if GreedyPoint.greedy and len(self.kept) * self.block_bytes < self.max_bytes:
            self.kept.append(np.ones(self.block_bytes, np.uint8))
        return super().step(action)


class SlowPoint(Point):
    """As slow as a robot's arm, so that its planner mostly waits."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.05)
        return super().step(action)


class BrokenPoint(Point):
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        raise RuntimeError("it never starts")


for kind in (Point, UnrulyPoint, GreedyPoint, SlowPoint, BrokenPoint):
    gymnasium.register(
        f"toy/{kind.__name__}-v0",
        entry_point=f"tests.support.envs.point:{kind.__name__}",
        max_episode_steps=HORIZON,
        disable_env_checker=True,
    )
