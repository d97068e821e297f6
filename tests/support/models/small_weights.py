"""Weights of a small random model, for tests: nothing learned, everything in place."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from m3pc.config.overrides import replace
from m3pc.config.presets import PRESETS
from m3pc.config.schema import Config
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic
from m3pc.model.weights import Weights, gather_tensors
from m3pc.types import Window, WindowBatch

STATES, ACTIONS, MAX_EPISODE_STEPS = 5, 2, 40
TINY = {
    "model.width": 16,
    "model.heads": 2,
    "planner.candidates": 12,
    "critic.width": 16,
}


def tiny_config(preset: str = "small", **changes: object) -> Config:
    """A preset with a tiny model; double underscores stand for dots."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return replace(PRESETS[preset], TINY | named)


def tiny_weights(
    config: Config,
    *,
    seed: int = 0,
    states: int = STATES,
    actions: int = ACTIONS,
    env: str | None = None,
) -> Weights:
    """Every parameter is random, those that start at 0 too, so that a mix-up changes numbers."""
    torch.manual_seed(seed)
    model = TrajectoryModel(config.model, states, actions)
    critic = Critic(config.critic, states, actions)
    with torch.no_grad():
        for parameter in (*model.parameters(), *critic.parameters()):
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
        for parameter in model.embed["actions"].parameters():
            parameter.mul_(5)  # plans differ in what follows them,
        for parameter in model.heads["actions"].parameters():
            parameter.mul_(0.1)  # and from each other: no tanh near its end
    rng = np.random.default_rng(seed)
    sizes = {"states": states, "rewards": 1, "returns": 1}
    arrays = {
        f"{name}.{part}": (rng.uniform(0.5, 2, size) * (1 if part == "std" else -1)).astype("f4")
        for name, size in sizes.items()
        for part in ("mean", "std")
    }
    return Weights(
        version=7,
        config=config,
        state_size=states,
        action_size=actions,
        max_episode_steps=MAX_EPISODE_STEPS,
        env=env,
        tensors=gather_tensors(
            model,
            critic,
            arrays=arrays,
            envelope=np.linspace(2, 1, MAX_EPISODE_STEPS, dtype=np.float32),
            return_range=np.asarray([-1, 3], np.float32),
        ),
    )


def windows(now: list[int], *, seed: int = 0, length: int = 8) -> Window:
    """Random windows with their current steps at `now`, each row at another step and seed."""
    rng = np.random.default_rng(seed)
    count = len(now)
    states = rng.standard_normal((count, length, STATES)).astype(np.float32)
    actions = rng.uniform(-1, 1, (count, length, ACTIONS)).astype(np.float32)
    return Window(
        states=states,
        actions=actions,
        now=np.asarray(now, np.int64),
        steps=np.asarray(now, np.int64) + 3 * np.arange(count),
        seeds=np.arange(count, dtype=np.int64) + 10 * seed,
    )


def window_batch(rows: int = 8, *, seed: int = 0, length: int = 8) -> WindowBatch[NDArray[Any]]:
    """Random windows, as a sampler returns them."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[Any]:
        return rng.standard_normal((rows, length, *shape)).astype(np.float32)

    return WindowBatch(
        states=normal(STATES),
        actions=np.tanh(normal(ACTIONS)),
        rewards=normal(),
        returns=normal(),
        steps=np.zeros(rows, np.int64),
    )
