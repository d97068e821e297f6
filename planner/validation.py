"""Checks whether a request can be answered at all, before it shares a batch with others."""

import math

import numpy as np

from m3pc.config.schema import MODES
from m3pc.types import InputError, PlanRequest, Window

MAX_RATIO = 10.0  # same limit as in the settings under conditioning
MAX_TARGET = 1e12  # largest sum of rewards, in absolute value
MAX_CANDIDATES = 1_000_000  # same limit as planner.candidates


def check_request(request: PlanRequest, *, length: int, state_size: int, action_size: int) -> None:
    """Refuse shapes, types and numbers that a model of these sizes cannot take."""
    if request.mode is not None and request.mode not in MODES:
        raise InputError(f"mode is {str(request.mode)[:40]!r}; give one of {', '.join(MODES)}")
    ratio, target = request.ratio, request.target_remaining
    if ratio is not None and not (math.isfinite(ratio) and 0 <= ratio <= MAX_RATIO):
        raise InputError(f"ratio is {ratio}; give a number from 0 to {MAX_RATIO:g}")
    if target is not None and not abs(target) <= MAX_TARGET:
        raise InputError(f"the reward to come is {target}; give {MAX_TARGET:g} at most")
    if target is not None and ratio is not None:
        raise InputError("both a ratio and a reward to come are given; give one of them")
    if request.candidates is not None and not 1 <= request.candidates <= MAX_CANDIDATES:
        raise InputError(f"candidates are {request.candidates}; give 1 to {MAX_CANDIDATES}")
    _check_shapes(request.window, length, state_size, action_size)
    _check_numbers(request.window, length)


def _check_shapes(window: Window, length: int, state_size: int, action_size: int) -> None:
    rows = window.now.size if isinstance(window.now, np.ndarray) else 0
    expected = {
        "now": ((rows,), np.int64),
        "states": ((rows, length, state_size), np.float32),
        "actions": ((rows, length, action_size), np.float32),
        "steps": ((rows,), np.int64),
        "seeds": ((rows,), np.int64),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(window, name)
        if not isinstance(array, np.ndarray):
            raise InputError(f"a window's {name} are a {type(array).__name__}; give an array")
        if array.shape != shape or array.dtype != dtype:
            raise InputError(
                f"a window's {name} are {array.dtype} {list(array.shape)}, "
                f"expected {np.dtype(dtype)} {list(shape)}"
            )


def _check_numbers(window: Window, length: int) -> None:
    for name in ("steps", "seeds"):
        if (getattr(window, name) < 0).any():
            lowest = getattr(window, name).min()
            raise InputError(f"one of a window's {name} is {lowest}; give 0 or more")
    if not (np.isfinite(window.states).all() and np.isfinite(window.actions).all()):
        raise InputError("a window holds NaN or Inf; give finite states and actions")
    if not ((window.now >= 0) & (window.now < length)).all():
        raise InputError(f"a window's current step must be in 0 .. {length - 1}")
