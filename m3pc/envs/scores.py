"""D4RL's scale for returns, on which a random policy has 0 and an expert 100."""

import re
from collections.abc import Mapping

from m3pc.core.env_ids import split_env_name
from m3pc.core.manipulation_tasks import TASKS

REFERENCE: Mapping[str, tuple[float, float]] = {
    # robot: mean episode return of (random, expert), from D4RL's own table
    "Hopper": (-20.272305, 3234.3),
    "Walker2d": (1.629008, 4592.3),
    "HalfCheetah": (-280.178953, 12135.0),
}
ROBOT = re.compile(r"(?:d4rl/)?(\w+?)(?:-v\d+)?")  # d4rl's ids and gymnasium's own, any version


def robot(env_id: str) -> str:
    """The robot of an id: Hopper for Hopper-v4 and d4rl/Hopper-v2, PickPlaceCan for
    robosuite/CanLim; other ids are returned unchanged."""
    plain, _ = split_env_name(env_id)
    if plain in TASKS:
        return TASKS[plain].name
    match = ROBOT.fullmatch(plain)
    return match[1] if match else plain


def normalised_score(env_id: str, episode_return: float) -> float | None:
    """The return on D4RL's scale; None where D4RL has no reference for the environment.

    An environment made with arguments is another environment, without a reference.
    """
    name = robot(env_id)
    if name not in REFERENCE or split_env_name(env_id)[1]:
        return None
    random, expert = REFERENCE[name]
    return 100 * (episode_return - random) / (expert - random)
