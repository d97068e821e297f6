"""Whether a request can be answered at all: looked at before it is put together with others."""

import math

import numpy as np

from m3pc.config.schema import MODES
from m3pc.types import InputError, PlanRequest, Window

LARGEST_RATIO = 10.0  # as of the settings under conditioning
LARGEST_SUM = 1e12  # of rewards
MOST_CANDIDATES = 1_000_000  # as of planner.candidates


def check_ask(ask: PlanRequest, *, length: int, state_size: int, action_size: int) -> None:
    """Refuse shapes, types and numbers that these sizes of a model cannot take."""
    if ask.mode is not None and ask.mode not in MODES:
        raise InputError(f"mode is {str(ask.mode)[:40]!r}; give one of {', '.join(MODES)}")
    ratio = ask.ratio
    if ratio is not None and not (math.isfinite(ratio) and 0 <= ratio <= LARGEST_RATIO):
        raise InputError(f"ratio is {ratio}; give a number from 0 to {LARGEST_RATIO:g}")
    to_come = ask.target_remaining
    if to_come is not None and not abs(to_come) <= LARGEST_SUM:
        raise InputError(f"the reward to come is {to_come}; give {LARGEST_SUM:g} at most")
    if to_come is not None and ratio is not None:
        raise InputError("both a ratio and a reward to come are asked for; give one of them")
    if ask.candidates is not None and not 1 <= ask.candidates <= MOST_CANDIDATES:
        raise InputError(f"candidates are {ask.candidates}; give 1 to {MOST_CANDIDATES}")
    _check_shapes(ask.window, length, state_size, action_size)
    _check_numbers(ask.window, length)


def _check_shapes(window: Window, length: int, state_size: int, action_size: int) -> None:
    rows = window.now.size if isinstance(window.now, np.ndarray) else 0
    wanted = {
        "now": ((rows,), np.int64),
        "states": ((rows, length, state_size), np.float32),
        "actions": ((rows, length, action_size), np.float32),
        "steps": ((rows,), np.int64),
        "seeds": ((rows,), np.int64),
    }
    for name, (shape, dtype) in wanted.items():
        found = getattr(window, name)
        if not isinstance(found, np.ndarray):
            raise InputError(f"a window's {name} are a {type(found).__name__}; give an array")
        if found.shape != shape or found.dtype != dtype:
            raise InputError(
                f"a window's {name} are {found.dtype} {list(found.shape)}, "
                f"expected {np.dtype(dtype)} {list(shape)}"
            )


def _check_numbers(window: Window, length: int) -> None:
    for name in ("steps", "seeds"):
        if (getattr(window, name) < 0).any():
            least = getattr(window, name).min()
            raise InputError(f"one of a window's {name} is {least}; give 0 or more")
    if not (np.isfinite(window.states).all() and np.isfinite(window.actions).all()):
        raise InputError("a window holds NaN or Inf; give finite states and actions")
    if not ((window.now >= 0) & (window.now < length)).all():
        raise InputError(f"a window's current step must be in 0 .. {length - 1}")
