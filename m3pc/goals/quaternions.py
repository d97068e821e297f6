"""Turns of a body as quaternions [..., 4]: x, y, z and then the scalar."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]


def composed(second: Numbers, first: Numbers) -> Doubles:
    """The turn `first`, and then `second`: their product, in this order."""
    u, v = second[..., :3].astype(np.float64), first[..., :3].astype(np.float64)
    a, b = second[..., 3:], first[..., 3:]
    scalar = a * b - (u * v).sum(axis=-1, keepdims=True)
    return np.concatenate([a * v + b * u + np.cross(u, v), scalar], axis=-1)


def inverse(turns: Numbers) -> Doubles:
    return np.asarray(turns * np.array([-1.0, -1.0, -1.0, 1.0]))


def applied(turns: Numbers, vectors: Numbers) -> Doubles:
    """Vectors [..., 3], turned."""
    axis = turns[..., :3].astype(np.float64)
    once = 2 * np.cross(axis, vectors.astype(np.float64))
    return np.asarray(vectors + turns[..., 3:] * once + np.cross(axis, once))
