"""Environments by id. Importing this registers `d4rl/*` and `robosuite/*`; a simulator is loaded
when its first environment is made.
"""

import gymnasium

from m3pc.core.manipulation_tasks import TASKS
from m3pc.envs.registry import engine, env_sizes, make, make_vector, step_limit
from m3pc.envs.scores import normalised_score, robot

__all__ = ["engine", "env_sizes", "make", "make_vector", "normalised_score", "robot", "step_limit"]

for _name in ("Hopper", "Walker2d", "HalfCheetah"):
    gymnasium.register(
        id=f"d4rl/{_name}-v2",
        entry_point=f"m3pc.envs.d4rl:{_name}Env",
        max_episode_steps=1000,
    )

for _id, _task in TASKS.items():
    gymnasium.register(
        id=_id,
        entry_point="m3pc.envs.robosuite:ManipulationEnv",
        max_episode_steps=_task.max_episode_steps,
        kwargs={"task": _id},
    )
