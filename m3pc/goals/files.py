"""Users' own goals: tables as .npy or .csv, documents as .json. H rows of a table, S state.

docs/GOALS.md describes the formats. Nothing in a file is executed: pickle is refused.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from m3pc.core.history import WaypointFn
from m3pc.types import Floats, InputError

MAX_BYTES = 64 << 20  # largest text file
MAX_ROWS = 1_000_000  # longest table; also the largest step in a document

# What numpy raises for a file that is not a .npy: Python's own parser reads its header.
DAMAGED = (OSError, ValueError, EOFError, TypeError, OverflowError, SyntaxError, TokenError,
           RecursionError, MemoryError)  # fmt: skip

FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
Dimension = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The contents of a file of goals."""

    waypoints: WaypointFn
    steps: int | None  # step of the last goal; None: a single state, to be held
    key: tuple[int, ...]  # dimensions that count; () if the file names none
    note: str  # where the goals come from, in words


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Goal(_Strict):
    step: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    state: Annotated[list[FiniteNumber], Field(min_length=1)]


class _Document(_Strict):
    format: Literal[1]
    goals: Annotated[list[_Goal], Field(min_length=1)]
    key: Dimension | list[Dimension] = []
    between: Literal["hold", "linear"] = "hold"

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        steps = [goal.step for goal in self.goals]
        if any(later <= step for step, later in pairwise(steps)):
            raise ValueError(f"the goals' steps are {steps[:20]}; give them in order, each once")
        return self


def read_goals(path: Path, state_size: int) -> Goals:
    """Read goals from a table or document, for states of that size."""
    if path.suffix == ".json":
        return _from_document(path, state_size)
    table = read_table(path, state_size)
    held = len(table) == 1
    return Goals(
        waypoints=lambda first: table,
        steps=None if held else len(table) - 1,
        key=(),
        note=f"one state of {path.name}, held" if held else f"{len(table)} rows of {path.name}",
    )


def read_table(path: Path, state_size: int) -> Floats:
    """Read a table [H, S] from a .npy or .csv; a single state is a table of one row."""
    if path.suffix not in TABLES:
        raise InputError(
            f"{path} is not called .npy or .csv; give a table of states with one of these endings"
        )
    table = TABLES[path.suffix](path, state_size)
    if not 1 <= len(table) <= MAX_ROWS:
        raise InputError(f"{path} has {len(table)} rows; expected 1 to {MAX_ROWS:,}")
    with np.errstate(over="ignore"):  # too large numbers are refused below
        states: Floats = table.astype(np.float32)
    bad = np.argwhere(~np.isfinite(states))
    if len(bad):
        row, column = bad[0].tolist()
        raise InputError(
            f"{path} has {table[row, column]} in row {row}, column {column} (from 0), which is not "
            "a finite 32-bit number; correct it there"
        )
    return states


def _npy(path: Path, state_size: int) -> Any:
    try:
        table: Any = np.lib.format.open_memmap(path, mode="r")
    except DAMAGED as error:
        raise InputError(f"{path} is not a .npy of numbers: {error}") from None
    shape = list(table.shape)
    if table.ndim == 1:
        table = table[None]
    if table.dtype.kind not in "fiu" or table.ndim != 2 or table.shape[1] != state_size:
        raise InputError(
            f"{path} has {table.dtype} of shape {shape}; expected rows of {state_size} numbers, "
            "one row a step"
        )
    return table


def _csv(path: Path, state_size: int) -> Any:
    rows = []
    for number, cells in enumerate(_lines(path), start=1):
        if not cells or (number == 1 and not any(_is_number(cell) for cell in cells)):
            continue  # an empty line, or column names
        if len(cells) != state_size or not all(_is_number(cell) for cell in cells):
            raise InputError(
                f"{path} has {','.join(cells)[:60]!r} in line {number}; expected {state_size} "
                "numbers with commas between them, one line a step"
            )
        rows.append([float(cell) for cell in cells])
    return np.array(rows, np.float64).reshape(-1, state_size)


def _lines(path: Path) -> Iterator[list[str]]:
    reader = csv.reader(_text(path).splitlines())
    try:
        yield from reader
    except csv.Error as error:
        raise InputError(
            f"{path} has {error} in line {reader.line_num}; correct it there"
        ) from None


TABLES: Mapping[str, Callable[[Path, int], Any]] = {".npy": _npy, ".csv": _csv}


def _from_document(path: Path, state_size: int) -> Goals:
    try:
        document = _Document.model_validate_json(_text(path))
    except ValidationError as error:
        raise InputError(f"{path} is not a document of goals: {first_fault(error)}") from None
    for goal in document.goals:
        if len(goal.state) != state_size:
            raise InputError(
                f"{path} has a state of {len(goal.state)} numbers for step {goal.step}; expected "
                f"{state_size}, as in a state of the environment"
            )
    steps = np.array([goal.step for goal in document.goals])
    states = np.array([goal.state for goal in document.goals], np.float64)
    if np.abs(states).max() > np.finfo(np.float32).max:
        raise InputError(f"{path} has numbers that are not finite in 32 bits; give smaller ones")
    waypoints = {"hold": _hold, "linear": _linear}[document.between](steps, states)
    return Goals(
        waypoints=waypoints,
        steps=int(steps[-1]),
        key=(document.key,)
        if isinstance(document.key, int)
        else tuple(dict.fromkeys(document.key)),
        note=f"{len(steps)} goals of {path.name}, between them: {document.between}",
    )


def _hold(steps: Any, states: Any) -> WaypointFn:
    """Each goal applies from the step after the previous goal's."""
    table = states[np.searchsorted(steps, np.arange(steps[-1] + 1))].astype(np.float32)
    return lambda first: table


def _linear(steps: Any, states: Any) -> WaypointFn:
    """Linear from the episode's first state to the first goal, and from goal to goal."""
    rows, known = np.arange(steps[-1] + 1), np.concatenate([[0], steps])

    def waypoints(first: Floats) -> Floats:
        columns = np.concatenate([first[None], states]).T
        return np.stack([np.interp(rows, known, column) for column in columns], axis=1).astype("f4")

    return waypoints


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB; give a smaller file")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}") from None


def first_fault(error: ValidationError) -> str:
    """The first fault of a document, and where it is."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {fault['msg']}" if where else fault["msg"]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
