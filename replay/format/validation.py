"""Decides which episodes and keys a store accepts."""

import math

import numpy as np

from m3pc.types import AppendKey, Episode, Floats, InputError
from replay.format.manifest import Header

MAX_KEY = (2**31 - 1, 2**63 - 1, 2**63 - 2)
ACTION_SLACK = 1e-4  # recorded actions exceed [-1, 1] by rounding errors


def check_episode(episode: Episode, header: Header, number: int) -> None:
    """Raise InputError for an episode that does not fit the store or would harm a learner."""
    length = len(episode)
    expected = {
        "states": (length + 1, header.states),
        "actions": (length, header.actions),
        "rewards": (length,),
    }
    if length < 1:
        raise InputError(f"episode {number} has no step; every episode needs one at least")
    if length > header.max_episode_steps:
        raise InputError(
            f"episode {number} has {length} steps, more than the step limit "
            f"{header.max_episode_steps}; give the right one with --horizon"
        )
    for name, shape in expected.items():
        values: Floats = getattr(episode, name)
        if values.shape != shape or values.dtype != np.float32:
            raise InputError(
                f"episode {number}: {name} are {values.dtype} {list(values.shape)}, "
                f"expected float32 {list(shape)}"
            )
        if not np.isfinite(values).all():
            row = int(np.argwhere(~np.isfinite(values))[0][0])
            raise InputError(
                f"episode {number}: {name} hold NaN or Inf at step {row}; "
                "every number must be finite, clean the source first"
            )
    for name in ("target_return", "utility"):
        if math.isinf(getattr(episode, name)):
            raise InputError(
                f"episode {number}: its {name} is infinite; expected a number, or NaN for none"
            )
    largest = float(np.abs(episode.actions).max())
    if largest > 1 + ACTION_SLACK:
        raise InputError(
            f"episode {number}: an action reaches {largest:.6g}, expected [-1, 1]; "
            "rescale the actions to the bounds of their space"
        )


def is_valid_key(key: AppendKey) -> bool:
    """Whether the key, and the next one of its producer, fit the columns of a segment."""
    return all(
        type(part) is int and 0 <= part <= limit for part, limit in zip(key, MAX_KEY, strict=True)
    )
