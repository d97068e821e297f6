"""D4RL's scale for returns: 0 is a random policy, 100 an expert; one pair for each robot."""

import re
from collections.abc import Mapping

REFERENCE: Mapping[str, tuple[float, float]] = {
    # robot: mean episode return of (random, expert), from D4RL's own table
    "Hopper": (-20.272305, 3234.3),
    "Walker2d": (1.629008, 4592.3),
    "HalfCheetah": (-280.178953, 12135.0),
}
ROBOT = re.compile(r"(?:d4rl/)?(\w+?)(?:-v\d+)?")  # d4rl's ids and gymnasium's own, any version


def normalised_score(env_id: str, episode_return: float) -> float | None:
    """The return on D4RL's scale; None where D4RL has no reference for the environment."""
    match = ROBOT.fullmatch(env_id)
    if match is None or match[1] not in REFERENCE:
        return None
    random, expert = REFERENCE[match[1]]
    return 100 * (episode_return - random) / (expert - random)
