"""An environment whose reset seed says how many steps it has: 2 + seed, and 2 without one."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

COUNTDOWN = "toy/Countdown-v0"  # importing this module registers it


class Countdown(gymnasium.Env[Any, Any]):
    """The state is (seed, steps done), the reward the steps done. Frames have odd sides."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)
    open: ClassVar[int] = 0  # made and not closed

    def __init__(self, render_mode: str | None = None, broken: bool = False) -> None:
        self.render_mode, self._broken = render_mode, broken
        self.done = 0
        Countdown.open += 1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._seed, self.done = seed or 0, 0
        return self._state(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.done += 1
        return self._state(), float(self.done), self.done == 2 + self._seed, False, {}

    def render(self) -> NDArray[np.uint8]:  # type: ignore[override]
        if self._broken:
            raise RuntimeError("no screen.")
        rng = np.random.default_rng(self.done)
        return rng.integers(0, 256, (65, 99, 3), np.uint8)

    def close(self) -> None:
        Countdown.open -= 1

    def _state(self) -> Any:
        return np.array([self._seed, self.done], np.float64)


gymnasium.register(
    "toy/Countdown-v0",
    entry_point="tests.support.envs.countdown:Countdown",
    max_episode_steps=50,
    disable_env_checker=True,
)
