"""Rotations as quaternions [..., 4]: x, y, z and then the scalar."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3pc.types import Doubles

Numbers = NDArray[np.floating[Any]]


def compose(second: Numbers, first: Numbers) -> Doubles:
    """The rotation `first` followed by `second`: the product second * first."""
    u, v = second[..., :3].astype(np.float64), first[..., :3].astype(np.float64)
    a, b = second[..., 3:], first[..., 3:]
    scalar = a * b - (u * v).sum(axis=-1, keepdims=True)
    return np.concatenate([a * v + b * u + np.cross(u, v), scalar], axis=-1)


def inverse(rotations: Numbers) -> Doubles:
    return np.asarray(rotations * np.array([-1.0, -1.0, -1.0, 1.0]))


def rotate(rotations: Numbers, vectors: Numbers) -> Doubles:
    """The vectors [..., 3], rotated."""
    axis = rotations[..., :3].astype(np.float64)
    once = 2 * np.cross(axis, vectors.astype(np.float64))
    return np.asarray(vectors + rotations[..., 3:] * once + np.cross(axis, once))
