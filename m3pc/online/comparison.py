"""The same planner before and after finetuning, on the same episodes. K episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3pc.config.overrides import flatten
from m3pc.config.schema import Config
from m3pc.evaluation.agent import configured_policy
from m3pc.evaluation.jobs import EvaluationJob, EvaluationResult
from m3pc.evaluation.statistics import bootstrap_interval
from m3pc.model import checkpoint
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.types import InputError

LABEL = "finetuned"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneComparison:
    run: Path
    before: EvaluationResult
    after: EvaluationResult

    @property
    def gains(self) -> NDArray[np.float64]:
        """[K] return after minus return before, of the same episode."""
        return self.after.evaluation.returns - self.before.evaluation.returns

    def sentence(self) -> str:
        low, high = bootstrap_interval(self.gains[None])
        uncertainty = f" (95 % interval {low:+.0f} to {high:+.0f})" if len(self.gains) > 1 else ""
        return (
            f"finetuned minus {self.before.mode}@{self.before.ratio:g} before: "
            f"{self.gains.mean():+.0f} in return{uncertainty}, paired by the seeds of "
            f"{len(self.gains)} episodes"
        )

    def as_json(self) -> dict[str, Any]:
        low, high = bootstrap_interval(self.gains[None])
        return {
            "run": str(self.run),
            "minus": {"planner": self.before.mode, "ratio": self.before.ratio},
            "difference": float(self.gains.mean()),
            "interval": [low, high] if len(self.gains) > 1 else None,
            "differences": self.gains.tolist(),
        }


def comparison_jobs(
    path: Path, ready: Sequence[EvaluationJob]
) -> tuple[EvaluationJob, EvaluationJob]:
    """Two evaluations with the run's planner: the one before finetuning, taken from `ready`, and
    the same with the weights of the run's newest checkpoint."""
    run, after = open_run(path), checkpoint.read(path)
    _check_start(run, ready[0])
    mode, ratio = run.config.planner.mode, run.config.conditioning.evaluation_ratio
    same = [f"planner.mode={mode}", f"conditioning.evaluation_ratio={ratio}"]
    planner = configured_policy(after, [*ready[0].request.sets, *same])
    before = next((job for job in ready if _has_planner(job, planner.config)), None)
    if before is None:
        raise InputError(
            f"{path} is evaluated with planner {mode}@{ratio:g}, which is not among those to "
            f"evaluate; give --planner {mode}@{ratio:g}, to compare"
        )
    _check_planner(path, before, planner.config)
    return before, replace(before, policy=planner, label=LABEL)


def _check_start(run: OnlineRun, first: EvaluationJob) -> None:
    weights, info = first.policy.weights, run.info
    sizes = (info.states, info.actions, info.max_episode_steps, info.env)
    expected = (weights.state_size, weights.action_size, weights.max_episode_steps, first.env_id)
    if sizes != expected:
        raise InputError(
            f"{run.path} has states, actions, step limit and environment {sizes}, "
            f"{first.request.path} is to be evaluated with {expected}; give a run of the same"
        )
    if info.source != weights.digest:
        raise InputError(
            f"{run.path} started from weights {info.source[:16]}, {first.request.path} has "
            f"{weights.digest[:16]}; give the checkpoint that it was finetuned from"
        )


def _has_planner(job: EvaluationJob, theirs: Config) -> bool:
    ours = job.policy.config
    return (ours.planner.mode, ours.conditioning.evaluation_ratio) == (
        theirs.planner.mode,
        theirs.conditioning.evaluation_ratio,
    )


def _check_planner(path: Path, before: EvaluationJob, config: Config) -> None:
    """Refuse a planner whose settings differ: only the weights may differ."""
    ours, theirs = flatten(before.policy.config), flatten(config)
    for name in ours:
        planned = name.startswith("planner.") or name == "conditioning.evaluation"
        if planned and ours[name] != theirs[name]:
            raise InputError(
                f"{name} is {ours[name]} in {before.request.path} and {theirs[name]} in {path}; "
                f"give --set {name}={theirs[name]} to evaluate both with the same planner"
            )
