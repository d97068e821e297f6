"""Evaluation of a run while it learns, always on the same episodes."""

import math
from dataclasses import dataclass

from m3pc.core.progress import OnProgress, ignore_progress
from m3pc.core.seeding import run_evaluation
from m3pc.evaluation.episodes import Evaluation, evaluate
from m3pc.model.weights import Weights
from m3pc.online.run_folder import OnlineRun
from planner.policy import Policy


def evaluate_run(
    run: OnlineRun,
    weights: Weights,
    on_progress: OnProgress = ignore_progress,
) -> Evaluation:
    """Play the run's evaluation episodes with its configured planner and these weights."""
    config = run.config
    return evaluate(
        run.info.env,
        Policy(weights),
        episodes=config.evaluation.episodes,
        seed=run_evaluation(config.seed),
        slots=config.evaluation.episodes,
        on_progress=on_progress,
    )


def is_due(previous: int, steps: int, *, every: int, last: bool) -> bool:
    """Whether to evaluate after `steps` steps if the previous evaluation was after `previous` steps
    (-1: none): at least one multiple of `every` was passed, or the run has ended."""
    return steps // every > previous // every or (last and steps > previous)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The part of an evaluation that metrics.jsonl keeps."""

    numbers: dict[str, float]
    returns: list[float]  # one per episode, by number


def evaluation_record(evaluation: Evaluation, updates: int) -> EvaluationRecord:
    """The record of an evaluation after `updates` updates."""
    numbers = {
        "return": evaluation.mean,
        "error": evaluation.standard_error,
        "score": math.nan if evaluation.score is None else evaluation.score,
        "length": float(evaluation.lengths.mean()),
        "updates": updates,
    }
    return EvaluationRecord(numbers=numbers, returns=evaluation.returns.tolist())
