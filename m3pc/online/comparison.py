"""The same planner before and after finetuning, on the same episodes. K episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3pc.config.overrides import flatten
from m3pc.config.schema import Config
from m3pc.evaluation.agent import policy
from m3pc.evaluation.evaluate import EvaluationJob, EvaluationResult
from m3pc.evaluation.statistics import interval
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
        low, high = interval(self.gains[None])
        sure = f" (95 % interval {low:+.0f} to {high:+.0f})" if len(self.gains) > 1 else ""
        return (
            f"finetuned minus {self.before.mode}@{self.before.ratio:g} before: "
            f"{self.gains.mean():+.0f} in return{sure}, paired by the seeds of "
            f"{len(self.gains)} episodes"
        )

    def as_json(self) -> dict[str, Any]:
        low, high = interval(self.gains[None])
        return {
            "run": str(self.run),
            "minus": {"planner": self.before.mode, "ratio": self.before.ratio},
            "difference": float(self.gains.mean()),
            "interval": [low, high] if len(self.gains) > 1 else None,
            "differences": self.gains.tolist(),
        }


def finetuned(path: Path, ready: Sequence[EvaluationJob]) -> tuple[EvaluationJob, EvaluationJob]:
    """The match that the run's own planner plays before, one of `ready`, and the same after: with
    the weights of its newest checkpoint."""
    run, after = open_run(path), checkpoint.read(path)
    _check_start(run, ready[0])
    ours = run.config
    same = [
        f"planner.mode={ours.planner.mode}",
        f"conditioning.evaluation_ratio={ours.conditioning.evaluation_ratio}",
    ]
    planner = policy(after, [*ready[0].order.sets, *same])
    before = next((one for one in ready if _plays(one, planner.config)), None)
    if before is None:
        raise InputError(
            f"{path} is evaluated with planner {ours.planner.mode}@"
            f"{ours.conditioning.evaluation_ratio:g}, which is not among those to play; give "
            f"--planner {ours.planner.mode}@{ours.conditioning.evaluation_ratio:g}, to compare"
        )
    _check_planner(path, before, planner.config)
    return before, replace(before, policy=planner, label=LABEL)


def _check_start(run: OnlineRun, first: EvaluationJob) -> None:
    weights, facts = first.policy.weights, run.facts
    found = (facts.states, facts.actions, facts.max_episode_steps, facts.env)
    expected = (weights.state_size, weights.action_size, weights.max_episode_steps, first.env_id)
    if found != expected:
        raise InputError(
            f"{run.path} has states, actions, step limit and environment {found}, "
            f"{first.order.path} is to be played with {expected}; give a run of the same"
        )
    if facts.source != weights.digest:
        raise InputError(
            f"{run.path} started from weights {facts.source[:16]}, {first.order.path} has "
            f"{weights.digest[:16]}; give the checkpoint that it was finetuned from"
        )


def _plays(match: EvaluationJob, config: Config) -> bool:
    ours, theirs = match.policy.config, config
    return (ours.planner.mode, ours.conditioning.evaluation_ratio) == (
        theirs.planner.mode,
        theirs.conditioning.evaluation_ratio,
    )


def _check_planner(path: Path, before: EvaluationJob, config: Config) -> None:
    """Nothing but the weights may differ."""
    ours, theirs = flatten(before.policy.config), flatten(config)
    for name in ours:
        planned = name.startswith("planner.") or name == "conditioning.evaluation"
        if planned and ours[name] != theirs[name]:
            raise InputError(
                f"{name} is {ours[name]} in {before.order.path} and {theirs[name]} in {path}; "
                f"give --set {name}={theirs[name]} to play both by the same planner"
            )
