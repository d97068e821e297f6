"""How good a run is by now: its planner on episodes that are the same all along the run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from m3pc.core.seeding import run_evaluation
from m3pc.evaluation.episodes import Evaluation, evaluate
from m3pc.model.weights import Weights
from m3pc.online.run_folder import OnlineRun
from planner.policy import Policy


def evaluation(
    run: OnlineRun,
    weights: Weights,
    on_progress: Callable[[Mapping[str, Any]], None] = lambda numbers: None,
) -> Evaluation:
    """Of the planner as it is configured, on episodes that are the same all along the run."""
    config = run.config
    return evaluate(
        run.facts.env,
        Policy(weights),
        episodes=config.evaluation.episodes,
        seed=run_evaluation(config.seed),
        slots=config.evaluation.episodes,
        window=config.model.window,
        horizon=config.planner.horizon,
        on_progress=on_progress,
    )


def is_due(before: int, steps: int, *, every: int, last: bool) -> bool:
    """After so many steps, if the last time was after `before` (below 0: never). A run is measured
    at its end, too."""
    return steps // every > before // every or (last and steps > before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What a run's log keeps of an evaluation."""

    numbers: dict[str, float]
    returns: list[float]  # of the episodes, which have the same seeds all along the run


def evaluated(found: Evaluation, updates: int) -> Evaluated:
    score = math.nan if found.score is None else found.score
    numbers = {"return": found.mean, "error": found.standard_error, "score": score}
    numbers |= {"length": float(found.lengths.mean()), "updates": updates}
    return Evaluated(numbers=numbers, returns=found.returns.tolist())
