"""What there is to reach: a row a task."""

from collections.abc import Mapping

from m3pc.config.schema import GoalConfig
from m3pc.envs import robot
from m3pc.goals.can_tasks import CANS
from m3pc.goals.locomotion_tasks import LOCOMOTION
from m3pc.goals.task import GoalTask

TASKS: Mapping[str, GoalTask] = {task.name: task for task in (*LOCOMOTION, *CANS)}


def rows_per_subgoal(config: GoalConfig, env: str) -> int:
    """1 for a robot without a field."""
    found: int = config.spacing.model_dump().get(robot(env).lower(), 1)
    return found
