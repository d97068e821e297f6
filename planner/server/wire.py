"""Requests and decisions as bytes: Ray carries one string far more cheaply than an object.

E environments, T steps of a window, S state, A action. After a fixed head come the arrays, end to
end, little-endian.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from m3pc.config.schema import MODES
from m3pc.types import Decision, InputError, PlanRequest, Window

FORMAT: Final = 4
# format, mode, ratio and reward to come (NaN: none), explore, mean, candidates (0: as configured),
# E, T, S, A
ASK: Final = struct.Struct("<HhddBB2xIIIII")
DECISION: Final = struct.Struct("<H6xqII")  # format, version, E, A
NO_MODE: Final = -1
INTEGER, FLOAT = np.dtype("<i8"), np.dtype("<f4")

ArrayLayout = Sequence[tuple[tuple[int, ...], "np.dtype[Any]"]]


def ask_to_bytes(ask: PlanRequest) -> bytes:
    window, mode = ask.window, NO_MODE
    if ask.mode is not None:
        if ask.mode not in MODES:
            raise InputError(f"mode is {ask.mode!r}; give one of {', '.join(MODES)}")
        mode = MODES.index(ask.mode)
    rows, length, states = window.states.shape
    actions = window.actions.shape[-1]
    ratio, to_come = (math.nan if x is None else x for x in (ask.ratio, ask.target_remaining))
    shapes = _ask_shapes(rows, length, states, actions)
    arrays: tuple[NDArray[Any], ...] = (window.now, window.steps, window.seeds)
    arrays += window.states, window.actions
    for array, (shape, dtype) in zip(arrays, shapes, strict=True):
        if array.shape != shape or array.dtype != dtype:
            raise InputError(
                f"a window has {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}"
            )
    asked = (mode, ratio, to_come, ask.explore, ask.mean, ask.candidates or 0)
    head = ASK.pack(FORMAT, *asked, rows, length, states, actions)
    return b"".join((head, *(array.tobytes() for array in arrays)))


def ask_from_bytes(content: bytes) -> PlanRequest:
    """Its arrays are read-only."""
    _require(len(content) >= ASK.size, "it is too short")
    written, mode, ratio, to_come, explore, mean, candidates, *sizes = ASK.unpack_from(content)
    _require(written == FORMAT, f"its format is {written}, this version reads {FORMAT}")
    _require(NO_MODE <= mode < len(MODES), f"its mode is {mode}")
    now, steps, seeds, states, actions = _arrays(content, ASK.size, _ask_shapes(*sizes))
    return PlanRequest(
        window=Window(states=states, actions=actions, now=now, steps=steps, seeds=seeds),
        mode=None if mode == NO_MODE else MODES[mode],
        ratio=None if math.isnan(ratio) else ratio,
        target_remaining=None if math.isnan(to_come) else to_come,
        explore=bool(explore),
        mean=bool(mean),
        candidates=candidates or None,
    )


def decision_to_bytes(decision: Decision) -> bytes:
    head = DECISION.pack(FORMAT, decision.version, *decision.actions.shape)
    columns = (
        decision.target_returns,
        decision.utilities,
        decision.effective_candidates,
        decision.utility_std,
    )
    arrays = (np.ascontiguousarray(x, FLOAT) for x in (decision.actions, *columns))
    return b"".join((head, *(array.tobytes() for array in arrays)))


def decision_from_bytes(content: bytes) -> Decision:
    """Its arrays may be written to."""
    _require(len(content) >= DECISION.size, "it is too short")
    written, version, rows, size = DECISION.unpack_from(content)
    _require(written == FORMAT, f"its format is {written}, this version reads {FORMAT}")
    shapes = [((rows, size), FLOAT), *[((rows,), FLOAT)] * 4]
    own = bytearray(content)
    actions, conditions, utilities, effective, spread = _arrays(own, DECISION.size, shapes)
    return Decision(
        actions=actions,
        target_returns=conditions,
        utilities=utilities,
        effective_candidates=effective,
        utility_std=spread,
        version=version,
    )


def _ask_shapes(rows: int, length: int, states: int, actions: int) -> ArrayLayout:
    return [
        *[((rows,), INTEGER)] * 3,
        ((rows, length, states), FLOAT),
        ((rows, length, actions), FLOAT),
    ]


def _arrays(content: bytes | bytearray, first: int, shapes: ArrayLayout) -> Iterator[NDArray[Any]]:
    size = first + sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    _require(len(content) == size, f"it has {len(content)} bytes, its head says {size}")
    for shape, dtype in shapes:
        count = math.prod(shape)
        yield np.frombuffer(content, dtype, count, first).reshape(shape)
        first += count * dtype.itemsize


def _require(fits: bool, why: str) -> None:
    if not fits:
        raise InputError(f"these bytes are no message of a planner: {why}")
