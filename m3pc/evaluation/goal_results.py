"""The results of a goal job as JSON. K episodes, P points of a trace, D key dimensions."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from m3pc.config.schema import BACKWARD
from m3pc.envs import engine, make
from m3pc.evaluation.goals import GoalCase, GoalJob, GoalOutcome
from m3pc.evaluation.statistics import bootstrap_interval, wilson_interval
from m3pc.goals.tracking import MEASURES
from m3pc.goals.waypoints import pad_rows
from m3pc.types import Doubles, Floats

FORMAT = 1
POINTS = 250  # points of a stored trace, about


def result_json(
    job: GoalJob, outcomes: Sequence[tuple[GoalCase, Mapping[str, GoalOutcome]]]
) -> dict[str, Any]:
    """The request and, per case, measures of each episode, means with 95 % intervals, traces."""
    request, task, weights = job.request, job.task, job.weights
    with closing(make(task.env)) as env:
        engine_name = engine(env)
    return {
        "format": FORMAT,
        "task": task.name,
        "waypoints": job.waypoint_kind,
        "env": task.env,
        "engine": engine_name,
        "checkpoint": str(request.path),
        "weights": weights.digest,
        "version": weights.version,
        "training_seed": weights.config.seed,
        "settings": list(request.sets),
        "seed": request.seed,
        "episodes": request.episodes,
        "steps": task.steps,
        "spacing": job.spacing,
        "key": list(task.key),
        "key_names": list(task.key_names),
        "tolerance": task.tolerance,
        "success": task.success_rule,
        "measures": MEASURES,
        "cases": [_case_json(job, case, by_planner) for case, by_planner in outcomes],
    }


def _case_json(job: GoalJob, case: GoalCase, outcomes: Mapping[str, GoalOutcome]) -> dict[str, Any]:
    tables = next(iter(outcomes.values())).tables
    all_same = all(np.array_equal(table, tables[0]) for table in tables)
    return {
        "name": case.name,
        "cycles": case.cycles,
        "guide": case.note,
        "every": _every(job),
        "references": [_trace(job, table) for table in tables[: 1 if all_same else None]],
        "subgoals": _subgoals(job, tables[0]),
        "planners": {mode: _planner_json(job, outcome) for mode, outcome in outcomes.items()},
        "difference": _difference(outcomes),
        "out_of_distribution": _distances(job, outcomes),
    }


def _planner_json(job: GoalJob, outcome: GoalOutcome) -> dict[str, Any]:
    return {
        "summary": {name: _summary(name, outcome.values(name)) for name in MEASURES},
        "episodes": [asdict(tracking) for tracking in outcome.tracking],
        "lengths": [len(episode) for episode in outcome.episodes],
        "traces": [_trace(job, episode.states) for episode in outcome.episodes],
    }


def _every(job: GoalJob) -> int:
    """Steps between two points of a trace."""
    return math.ceil(job.task.steps / POINTS)


def _trace(job: GoalJob, states: Floats) -> list[list[float]]:
    """The key at every `_every`-th step, [P, D]."""
    rows = slice(0, job.task.steps + 1, _every(job))
    key = pad_rows(states, job.task.steps + 1)[rows, job.task.key]
    return [[round(value, 4) for value in row] for row in key.tolist()]


def _subgoals(job: GoalJob, table: Floats) -> list[list[float]]:
    """The last row of each block: its step, and the key there."""
    ends = range(job.spacing - 1, job.task.steps + 1, job.spacing)
    return [[end, *(round(float(table[end, d]), 4) for d in job.task.key)] for end in ends]


def _summary(measure: str, values: Doubles) -> dict[str, Any]:
    """The mean with its 95 % interval: Wilson's for `success`, else a bootstrap over episodes."""
    if measure != "success":
        return _bootstrap_summary(values)
    low, high = wilson_interval(int(values.sum()), len(values))
    return {"mean": float(values.mean()), "low": low, "high": high}


def _bootstrap_summary(values: Doubles) -> dict[str, Any]:
    """The mean with its 95 % interval; a single episode has no interval."""
    low, high = bootstrap_interval(values[None]) if len(values) > 1 else (None, None)
    return {"mean": float(values.mean()), "low": low, "high": high}


def _difference(outcomes: Mapping[str, GoalOutcome]) -> dict[str, Any] | None:
    """`goal` minus `goal-mask`, episode by episode."""
    if len(outcomes) < len(BACKWARD):
        return None
    first, second = (outcomes[mode] for mode in BACKWARD)
    return {name: _bootstrap_summary(first.values(name) - second.values(name)) for name in MEASURES}


def _distances(job: GoalJob, outcomes: Mapping[str, GoalOutcome]) -> dict[str, Any] | None:
    """Distances of goals and visited states from the data, divided by the typical distance."""
    distribution = job.distribution
    if distribution is None:
        return None
    goals = next(iter(outcomes.values())).goal_states(job.task.steps)
    return {
        "explained": list(distribution.explained),
        "typical": distribution.typical,
        "goals": distribution.distance(goals),
        "visited": {
            mode: distribution.distance(outcome.visited_states)
            for mode, outcome in outcomes.items()
        },
    }
