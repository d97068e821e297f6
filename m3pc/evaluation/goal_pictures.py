"""Pictures of goal results: tracked keys, and visited states beside the data. D key dimensions."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3pc import plots
from m3pc.evaluation.goals import GoalCase, GoalJob, GoalOutcome

SCATTER = 4_000  # points drawn of a cloud, about


def draw_tracking(result: Mapping[str, Any], path: Path) -> None:
    """Draw the key against the goal, with one panel per case and dimension."""
    panels = [
        _panel(case, number, name, result["tolerance"])
        for case in result["cases"]
        for number, name in enumerate(result["key_names"])
    ]
    plots.tracking(path, panels)


def _panel(
    case: Mapping[str, Any], number: int, key_name: str, tolerance: float
) -> plots.TrackedDimension:
    references = np.array(case["references"])
    goal = np.median(references[:, :, number], axis=0)
    steps = np.arange(len(goal)) * case["every"]
    shown = case["subgoals"] if len(references) == 1 else []  # subgoals are of episode 0 only
    subgoals = np.array(shown, np.float64).reshape(-1, 1 + references.shape[2])
    lines = {}
    for mode, planner in case["planners"].items():
        error = planner["summary"]["rms"]["mean"]
        label = f"planner {mode}: off by {error:.3g}"
        lines[label] = np.array(planner["traces"])[:, :, number]
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
    job: GoalJob, outcomes: Sequence[tuple[GoalCase, Mapping[str, GoalOutcome]]], path: Path
) -> None:
    """Draw data, goals and visited states in the plane of the data's two principal components."""
    distribution = job.distribution
    assert distribution is not None
    panels = []
    for case, by_mode in outcomes:
        first = next(iter(by_mode.values()))
        goal_distance = distribution.distance(first.goal_states(job.task.steps))
        clouds = {}
        for mode, outcome in by_mode.items():
            states = outcome.visited_states
            label = f"planner {mode}, at {distribution.distance(states):.1f}"
            clouds[label] = distribution.plane(_thinned(states))
        panels.append(
            plots.PlanePath(
                title=case.name,
                data=_thinned(distribution.scatter()),
                goals=distribution.plane(first.tables[0][: job.task.steps + 1]),
                goals_label=f"goals, at {goal_distance:.1f}",
                clouds=clouds,
            )
        )
    plots.planes(path, panels, explained=distribution.explained)


def _thinned(points: NDArray[Any]) -> NDArray[Any]:
    return points[:: math.ceil(len(points) / SCATTER)]
