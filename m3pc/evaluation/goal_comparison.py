"""Results of one goal experiment with several trained models, read and merged.

P points of a trace, D key dimensions.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from m3pc.config.schema import BACKWARD
from m3pc.evaluation.goal_results import FORMAT
from m3pc.evaluation.statistics import t_interval
from m3pc.goals.files import FiniteNumber, first_fault
from m3pc.goals.tracking import MEASURES
from m3pc.types import Doubles, InputError

MAX_BYTES = 256 << 20  # largest file
SHARES = ("within", "success")  # measures of at most 1
# Fields that must be equal in all files of one experiment and, below, in each of their cases.
SAME_EXPERIMENT = (
    *("task", "waypoints", "env", "engine", "settings", "seed", "episodes"),
    *("steps", "spacing", "key", "tolerance"),
)
SAME_CASE = ("every", "references", "subgoals")


class _Loose(BaseModel):
    """Checks the declared fields and keeps the others."""

    model_config = ConfigDict(extra="allow")


ResultRows = list[list[FiniteNumber]]  # trace [P, D]


class _Mean(_Loose):
    mean: FiniteNumber
    low: FiniteNumber | None
    high: FiniteNumber | None


class _Planner(_Loose):
    summary: dict[str, _Mean]
    traces: Annotated[list[ResultRows], Field(min_length=1)]


class _Case(_Loose):
    name: str
    every: Annotated[int, Field(ge=1)]
    references: Annotated[list[ResultRows], Field(min_length=1)]
    subgoals: ResultRows  # [., 1 + D]
    planners: Annotated[dict[Literal["goal", "goal-mask"], _Planner], Field(min_length=1)]

    def traces(self) -> Iterator[ResultRows]:
        """All traces, which have points for the same steps."""
        yield from self.references
        for planner in self.planners.values():
            yield from planner.traces


class _Result(_Loose):
    """The fields of a file that a comparison reads."""

    format: Literal[1]
    task: str
    waypoints: str
    env: str
    engine: str
    settings: list[str]
    seed: int
    episodes: int
    steps: Annotated[int, Field(ge=1)]
    spacing: int
    key: Annotated[list[int], Field(min_length=1)]
    key_names: list[str]
    tolerance: FiniteNumber
    success: str
    weights: str
    training_seed: int
    cases: Annotated[list[_Case], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        width = len(self.key)
        if len(self.key_names) != width:
            raise ValueError(f"key has {width} dimensions, key_names {len(self.key_names)}")
        names = [case.name for case in self.cases]
        if len(set(names)) < len(names):
            raise ValueError(f"the cases are {names}; expected each name once")
        for case in self.cases:
            points = len(range(0, self.steps + 1, case.every))
            for trace in case.traces():
                if len(trace) != points or any(len(row) != width for row in trace):
                    raise ValueError(f"{case.name} has a trace other than of [{points}, {width}]")
            if any(len(row) != 1 + width for row in case.subgoals):
                raise ValueError(f"{case.name} has subgoals of other than {1 + width} numbers")
        return self


def read_result(path: Path) -> dict[str, Any]:
    """Read and check a file that `m3pc goal` wrote."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"{path} is larger than {MAX_BYTES >> 20} MiB; give results of m3pc goal"
            )
        result = _Result.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} is not a result of m3pc goal: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path} is not a result of m3pc goal: {first_fault(error)}") from None
    for case in result.cases:
        for mode, planner in case.planners.items():
            for missing in MEASURES.keys() - planner.summary.keys():
                raise InputError(f"{path} has no {missing} of {mode}; play it again")
    return result.model_dump()


def merge_results(files: Sequence[Path]) -> dict[str, Any]:
    """Merge results of one experiment: means over models, 95 % intervals by Student's t."""
    results = [read_result(path) for path in files]
    for path, result in zip(files, results, strict=True):
        for name in SAME_EXPERIMENT:
            if result[name] != results[0][name]:
                raise InputError(
                    f"{path} has {name} {result[name]}, {files[0]} {results[0][name]}; compare "
                    "results of one task with the same settings"
                )
    if len({result["weights"] for result in results}) < len(results):
        raise InputError("two of the files are of the same weights; give one a trained model")
    cases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path, result in zip(files, results, strict=True):
        for case in result["cases"]:
            same = cases[case["name"]]
            same.append(case)
            if any(case[name] != same[0][name] for name in SAME_CASE):
                raise InputError(
                    f"{path} was to reach other states in {case['name']} than the files before it; "
                    "compare results of the same goals and --data"
                )
    about = {name: results[0][name] for name in (*SAME_EXPERIMENT, "key_names", "success")}
    return {
        **about,
        "format": FORMAT,
        "measures": MEASURES,
        "models": [result["weights"] for result in results],
        "training_seeds": [result["training_seed"] for result in results],
        "cases": [_merge_case(name, same) for name, same in cases.items()],
    }


def _merge_case(name: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    modes = [mode for mode in cases[0]["planners"] if all(mode in c["planners"] for c in cases)]
    means = {  # one value per model
        mode: {
            measure: np.array([c["planners"][mode]["summary"][measure]["mean"] for c in cases])
            for measure in MEASURES
        }
        for mode in modes
    }
    difference = None
    if len(modes) == len(BACKWARD):
        first, second = BACKWARD
        difference = {
            m: _summary(means[first][m] - means[second][m], -_max_value(m), _max_value(m))
            for m in MEASURES
        }
    return {
        "name": name,
        "models": len(cases),
        "every": cases[0]["every"],
        "references": cases[0]["references"],
        "subgoals": cases[0]["subgoals"],
        "planners": {
            mode: {
                "summary": {m: _summary(means[mode][m], 0.0, _max_value(m)) for m in MEASURES},
                "traces": [trace for c in cases for trace in c["planners"][mode]["traces"]],
            }
            for mode in modes
        },
        "difference": difference,
    }


def _summary(values: Doubles, lowest: float, highest: float) -> dict[str, Any]:
    """The mean over models, and its interval clipped to [lowest, highest], None for one model."""
    low, high = t_interval(values)
    has_interval = not math.isnan(low)
    return {
        "mean": float(values.mean()),
        "low": max(low, lowest) if has_interval else None,
        "high": min(high, highest) if has_interval else None,
        "models": values.tolist(),
    }


def _max_value(measure: str) -> float:
    return 1.0 if measure in SHARES else math.inf
