"""Environments by id. Importing this registers `d4rl/*`; mujoco loads when one is made."""

import gymnasium

from m3pc.envs.make import engine, make, make_vector, step_limit
from m3pc.envs.scores import normalised_score

__all__ = ["engine", "make", "make_vector", "normalised_score", "step_limit"]

for robot in ("Hopper", "Walker2d", "HalfCheetah"):
    gymnasium.register(
        id=f"d4rl/{robot}-v2",
        entry_point=f"m3pc.envs.d4rl:{robot}Env",
        max_episode_steps=1000,
    )
