"""Requests and decisions as bytes, which Ray carries far more cheaply than objects.

E environments, T steps of a window, S state, A action. A fixed head precedes the arrays; all is
little-endian.
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
# format, mode, ratio and target that remains (NaN: none), explore, mean, candidates (0: as
# configured), E, T, S, A
REQUEST: Final = struct.Struct("<HhddBB2xIIIII")
DECISION: Final = struct.Struct("<H6xqII")  # format, version, E, A
NO_MODE: Final = -1
INTEGER, FLOAT = np.dtype("<i8"), np.dtype("<f4")

ArrayLayout = Sequence[tuple[tuple[int, ...], "np.dtype[Any]"]]


def request_to_bytes(request: PlanRequest) -> bytes:
    """InputError if a mode or an array does not fit the format; values are not checked."""
    window, mode = request.window, NO_MODE
    if request.mode is not None:
        if request.mode not in MODES:
            raise InputError(f"mode is {request.mode!r}; give one of {', '.join(MODES)}")
        mode = MODES.index(request.mode)
    sizes = (*window.states.shape, window.actions.shape[-1])
    arrays: tuple[NDArray[Any], ...] = (window.now, window.steps, window.seeds)
    arrays += window.states, window.actions
    for array, (shape, dtype) in zip(arrays, _request_layout(*sizes), strict=True):
        if array.shape != shape or array.dtype != dtype:
            raise InputError(
                f"a window has {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}"
            )
    ratio, target = (
        math.nan if x is None else x for x in (request.ratio, request.target_remaining)
    )
    settings = (mode, ratio, target, request.explore, request.mean, request.candidates or 0)
    head = REQUEST.pack(FORMAT, *settings, *sizes)
    return b"".join((head, *(array.tobytes() for array in arrays)))


def request_from_bytes(content: bytes) -> PlanRequest:
    """The returned arrays are read-only."""
    _require(len(content) >= REQUEST.size, "it is too short")
    written, mode, ratio, target, explore, mean, candidates, *sizes = REQUEST.unpack_from(content)
    _require(written == FORMAT, f"its format is {written}, this version reads {FORMAT}")
    _require(NO_MODE <= mode < len(MODES), f"its mode is {mode}")
    layout = _request_layout(*sizes)
    now, steps, seeds, states, actions = _arrays(content, REQUEST.size, layout)
    return PlanRequest(
        window=Window(states=states, actions=actions, now=now, steps=steps, seeds=seeds),
        mode=None if mode == NO_MODE else MODES[mode],
        ratio=None if math.isnan(ratio) else ratio,
        target_remaining=None if math.isnan(target) else target,
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
    """The returned arrays are writable."""
    _require(len(content) >= DECISION.size, "it is too short")
    written, version, rows, size = DECISION.unpack_from(content)
    _require(written == FORMAT, f"its format is {written}, this version reads {FORMAT}")
    layout = [((rows, size), FLOAT), *[((rows,), FLOAT)] * 4]
    actions, target_returns, utilities, effective_candidates, utility_std = _arrays(
        bytearray(content), DECISION.size, layout
    )
    return Decision(
        actions=actions,
        target_returns=target_returns,
        utilities=utilities,
        effective_candidates=effective_candidates,
        utility_std=utility_std,
        version=version,
    )


def _request_layout(rows: int, length: int, states: int, actions: int) -> ArrayLayout:
    return [
        *[((rows,), INTEGER)] * 3,
        ((rows, length, states), FLOAT),
        ((rows, length, actions), FLOAT),
    ]


def _arrays(content: bytes | bytearray, first: int, layout: ArrayLayout) -> Iterator[NDArray[Any]]:
    size = first + sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout)
    _require(len(content) == size, f"it has {len(content)} bytes, its head says {size}")
    for shape, dtype in layout:
        count = math.prod(shape)
        yield np.frombuffer(content, dtype, count, first).reshape(shape)
        first += count * dtype.itemsize


def _require(fits: bool, why: str) -> None:
    if not fits:
        raise InputError(f"these bytes are no message of a planner: {why}")
