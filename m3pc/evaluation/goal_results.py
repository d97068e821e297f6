"""What came of trying to reach goals: as JSON, over several training seeds, and as pictures.

K episodes, P points of a trace, N files, D key dimensions.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from m3pc import plots
from m3pc.config.schema import BACKWARD
from m3pc.envs import engine, make
from m3pc.evaluation.episodes import wilson
from m3pc.evaluation.goals import Case, GoalOutcome, Trial
from m3pc.evaluation.statistics import interval, t_interval
from m3pc.goals.files import FiniteNumber, first_fault
from m3pc.goals.guides import held
from m3pc.goals.tracking import MEASURES
from m3pc.types import Floats, InputError

FORMAT = 1
LARGEST = 256 << 20  # bytes of a file
POINTS = 250  # of a trace that is kept, about
SCATTER = 4_000  # points of a cloud that is drawn, about
SHARES = ("within", "success")  # measures of at most 1
ALIKE = (  # to be one experiment
    *("task", "waypoints", "env", "engine", "settings", "seed", "episodes"),
    *("steps", "spacing", "key", "tolerance"),
)
ROUTE = ("every", "references", "subgoals")  # of a case, likewise: what was wanted when


def as_json(
    trial: Trial, outcomes: Sequence[tuple[Case, Mapping[str, GoalOutcome]]]
) -> dict[str, Any]:
    """What was asked for, and each case: the measures of each episode, means with 95 %, traces."""
    order, task, weights = trial.order, trial.task, trial.weights
    with closing(make(task.env)) as env:
        engine_name = engine(env)
    return {
        "format": FORMAT,
        "task": task.name,
        "waypoints": trial.kind,
        "env": task.env,
        "engine": engine_name,
        "checkpoint": str(order.path),
        "weights": weights.digest,
        "version": weights.version,
        "training_seed": weights.config.seed,
        "settings": list(order.sets),
        "seed": order.seed,
        "episodes": order.episodes,
        "steps": task.steps,
        "spacing": trial.spacing,
        "key": list(task.key),
        "key_names": list(task.key_names),
        "tolerance": task.tolerance,
        "success": task.rule,
        "measures": MEASURES,
        "cases": [_case_json(trial, case, found) for case, found in outcomes],
    }


def _case_json(trial: Trial, case: Case, outcomes: Mapping[str, GoalOutcome]) -> dict[str, Any]:
    tables = next(iter(outcomes.values())).tables
    same = all(np.array_equal(table, tables[0]) for table in tables)
    return {
        "name": case.name,
        "cycles": case.cycles,
        "guide": case.note,
        "every": _every(trial),
        "references": [_trace(trial, table) for table in tables[: 1 if same else None]],
        "subgoals": _subgoals(trial, tables[0]),
        "planners": {mode: _planner_json(trial, found) for mode, found in outcomes.items()},
        "difference": _difference(outcomes),
        "out_of_distribution": _distances(trial, outcomes),
    }


def _planner_json(trial: Trial, outcome: GoalOutcome) -> dict[str, Any]:
    return {
        "summary": {name: _summary(name, outcome.values(name)) for name in MEASURES},
        "episodes": [asdict(one) for one in outcome.tracking],
        "lengths": [len(episode) for episode in outcome.episodes],
        "traces": [_trace(trial, episode.states) for episode in outcome.episodes],
    }


def _every(trial: Trial) -> int:
    """Steps between two points of a trace."""
    return math.ceil(trial.task.steps / POINTS)


def _trace(trial: Trial, states: Floats) -> list[list[float]]:
    """[P, D]"""
    rows = slice(0, trial.task.steps + 1, _every(trial))
    key = held(states, trial.task.steps + 1)[rows, trial.task.key]
    return [[round(value, 4) for value in row] for row in key.tolist()]


def _subgoals(trial: Trial, table: Floats) -> list[list[float]]:
    """The last row of each block: its step, and the key there."""
    ends = range(trial.spacing - 1, trial.task.steps + 1, trial.spacing)
    return [[end, *(round(float(table[end, d]), 4) for d in trial.task.key)] for end in ends]


def _summary(measure: str, values: NDArray[np.float64]) -> dict[str, Any]:
    """95 % by a bootstrap over episodes; of a share of episodes by Wilson, as in an evaluation."""
    if measure != "success":
        return _bootstrapped(values)
    low, high = wilson(int(values.sum()), len(values))
    return {"mean": float(values.mean()), "low": low, "high": high}


def _bootstrapped(values: NDArray[np.float64]) -> dict[str, Any]:
    """No interval for one episode, which does not tell how much episodes differ."""
    low, high = interval(values[None]) if len(values) > 1 else (None, None)
    return {"mean": float(values.mean()), "low": low, "high": high}


def _difference(outcomes: Mapping[str, GoalOutcome]) -> dict[str, Any] | None:
    """`goal` minus `goal-mask`, in whichever order they were played, episode by episode."""
    if len(outcomes) < len(BACKWARD):
        return None
    first, second = (outcomes[mode] for mode in BACKWARD)
    return {name: _bootstrapped(first.values(name) - second.values(name)) for name in MEASURES}


def _distances(trial: Trial, outcomes: Mapping[str, GoalOutcome]) -> dict[str, Any] | None:
    """Of the goals and of the visited states from the data, over what is typical there."""
    found = trial.distribution
    if found is None:
        return None
    return {
        "explained": list(found.explained),
        "typical": found.typical,
        "goals": found.distance(goal_states(trial, next(iter(outcomes.values())))),
        "visited": {mode: found.distance(visited(one)) for mode, one in outcomes.items()},
    }


def goal_states(trial: Trial, outcome: GoalOutcome) -> Floats:
    """Each state once that was wanted at some step that matters: [N, S]"""
    rows = np.concatenate([table[: trial.task.steps + 1] for table in outcome.tables])
    return np.unique(rows, axis=0)


def visited(outcome: GoalOutcome) -> Floats:
    return np.concatenate([episode.states for episode in outcome.episodes])


# Several training seeds


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


ResultRows = list[list[FiniteNumber]]  # [P, D] of a trace


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
        """All that have a point for the same steps."""
        yield from self.references
        for planner in self.planners.values():
            yield from planner.traces


class _Result(_Loose):
    """What a comparison reads of a file."""

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


def read(path: Path) -> dict[str, Any]:
    """A file that `m3pc goal` wrote."""
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(
                f"{path} is larger than {LARGEST >> 20} MiB; give results of m3pc goal"
            )
        found = _Result.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} is not a result of m3pc goal: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path} is not a result of m3pc goal: {first_fault(error)}") from None
    for case in found.cases:
        for mode, planner in case.planners.items():
            for missing in MEASURES.keys() - planner.summary.keys():
                raise InputError(f"{path} has no {missing} of {mode}; play it again")
    return found.model_dump()


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """The same experiment with several trained models: means over models, 95 % by Student's t."""
    results = [read(path) for path in files]
    for path, result in zip(files, results, strict=True):
        for name in ALIKE:
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
            if any(case[name] != same[0][name] for name in ROUTE):
                raise InputError(
                    f"{path} was to reach other states in {case['name']} than the files before it; "
                    "compare results of the same goals and --data"
                )
    about = {name: results[0][name] for name in (*ALIKE, "key_names", "success")}
    return {
        **about,
        "format": FORMAT,
        "measures": MEASURES,
        "models": [result["weights"] for result in results],
        "training_seeds": [result["training_seed"] for result in results],
        "cases": [_merged_case(name, found) for name, found in cases.items()],
    }


def _merged_case(name: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    modes = [mode for mode in cases[0]["planners"] if all(mode in c["planners"] for c in cases)]
    means = {
        mode: {
            measure: np.array([c["planners"][mode]["summary"][measure]["mean"] for c in cases])
            for measure in MEASURES
        }
        for mode in modes
    }
    difference = None
    if len(modes) == len(BACKWARD):
        first, second = BACKWARD
        apart = {m: _over_models(means[first][m] - means[second][m]) for m in MEASURES}
        difference = {m: _possible(m, apart[m], least=-_most(m)) for m in MEASURES}
    return {
        "name": name,
        "models": len(cases),
        "every": cases[0]["every"],
        "references": cases[0]["references"],
        "subgoals": cases[0]["subgoals"],
        "planners": {
            mode: {
                "summary": {m: _possible(m, _over_models(means[mode][m])) for m in MEASURES},
                "traces": [trace for c in cases for trace in c["planners"][mode]["traces"]],
            }
            for mode in modes
        },
        "difference": difference,
    }


def _over_models(values: NDArray[np.float64]) -> dict[str, Any]:
    low, high = (None if math.isnan(end) else end for end in t_interval(values))
    return {"mean": float(values.mean()), "low": low, "high": high, "models": values.tolist()}


def _possible(measure: str, found: dict[str, Any], *, least: float = 0.0) -> dict[str, Any]:
    """The interval without what the measure cannot be: no distance is below 0, no share above 1."""
    if found["low"] is None:
        return found
    return found | {
        "low": max(found["low"], least),
        "high": min(found["high"], _most(measure)),
    }


def _most(measure: str) -> float:
    return 1.0 if measure in SHARES else math.inf


# Pictures


def draw_tracking(result: Mapping[str, Any], path: Path) -> None:
    """The key against the goal, a panel a case and dimension."""
    panels = []
    for case in result["cases"]:
        for number, name in enumerate(result["key_names"]):
            panels.append(_panel(case, number, name, result["tolerance"]))
    plots.tracking(path, panels)


def _panel(
    case: Mapping[str, Any], number: int, key_name: str, tolerance: float
) -> plots.TrackedDimension:
    references = np.array(case["references"])
    goal = np.median(references[:, :, number], axis=0)
    steps = np.arange(len(goal)) * case["every"]
    shown = case["subgoals"] if len(references) == 1 else []  # they are the first episode's
    subgoals = np.array(shown, np.float64).reshape(-1, 1 + references.shape[2])
    lines = {}
    for mode, found in case["planners"].items():
        error = found["summary"]["rms"]["mean"]
        label = f"planner {mode}: off by {error:.3g}"
        lines[label] = np.array(found["traces"])[:, :, number]
    return plots.TrackedDimension(
        title=case["name"],
        unit=key_name,
        steps=steps,
        goal=goal,
        subgoals=(subgoals[:, 0], subgoals[:, 1 + number]),
        lines=lines,
        tolerance=tolerance,
    )


def draw_states(
    trial: Trial, outcomes: Sequence[tuple[Case, Mapping[str, GoalOutcome]]], path: Path
) -> None:
    """Data, goals and visited states in the plane of the data's first two principal components."""
    found = trial.distribution
    assert found is not None
    panels = []
    for case, by_mode in outcomes:
        first = next(iter(by_mode.values()))
        goals = goal_states(trial, first)
        route = first.tables[0][: trial.task.steps + 1]
        distance = found.distance(goals)
        clouds = {
            f"planner {mode}, at {found.distance(visited(one)):.1f}": found.plane(
                _some(visited(one))
            )
            for mode, one in by_mode.items()
        }
        panels.append(
            plots.PlanePath(
                title=case.name,
                data=_some(found.scatter()),
                goals=found.plane(route),
                goals_label=f"wanted, at {distance:.1f}",
                clouds=clouds,
            )
        )
    plots.planes(path, panels, explained=found.explained)


def _some(points: NDArray[Any]) -> NDArray[Any]:
    return points[:: math.ceil(len(points) / SCATTER)]
