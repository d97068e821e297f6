"""D4RL's scale for returns: 0 is a random policy, 100 an expert; one pair for each robot."""

import re
from collections.abc import Mapping

from m3pc.core.env_ids import parted
from m3pc.core.manipulation_tasks import TASKS

REFERENCE: Mapping[str, tuple[float, float]] = {
    # robot: mean episode return of (random, expert), from D4RL's own table
    "Hopper": (-20.272305, 3234.3),
    "Walker2d": (1.629008, 4592.3),
    "HalfCheetah": (-280.178953, 12135.0),
}
ROBOT = re.compile(r"(?:d4rl/)?(\w+?)(?:-v\d+)?")  # d4rl's ids and gymnasium's own, any version


def robot(env_id: str) -> str:
    """Hopper of Hopper-v4 and of d4rl/Hopper-v2, PickPlaceCan of robosuite/CanLim; an id of another
    form as it is."""
    plain, _ = parted(env_id)
    if plain in TASKS:
        return TASKS[plain].name
    match = ROBOT.fullmatch(plain)
    return match[1] if match else plain


def normalised_score(env_id: str, episode_return: float) -> float | None:
    """The return on D4RL's scale; None where D4RL has no reference for the environment.

    One that is made with other arguments is another environment.
    """
    name = robot(env_id)
    if name not in REFERENCE or parted(env_id)[1]:
        return None
    random, expert = REFERENCE[name]
    return 100 * (episode_return - random) / (expert - random)
