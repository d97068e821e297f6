"""All goal tasks, by name."""

from collections.abc import Mapping

from m3pc.config.schema import GoalConfig
from m3pc.envs import robot
from m3pc.goals.can_tasks import CAN_TASKS
from m3pc.goals.locomotion_tasks import LOCOMOTION_TASKS
from m3pc.goals.task import GoalTask

TASKS: Mapping[str, GoalTask] = {task.name: task for task in (*LOCOMOTION_TASKS, *CAN_TASKS)}


def rows_per_subgoal(config: GoalConfig, env: str) -> int:
    """The setting `goal.spacing` for the robot of an environment; 1 for other robots."""
    spacing: int = config.spacing.model_dump().get(robot(env).lower(), 1)
    return spacing
