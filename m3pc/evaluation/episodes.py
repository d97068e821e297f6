"""The evaluation of any planner: play episodes that depend on a seed alone, and average them.

`m3pc.evaluation.jobs` decides which planner of which checkpoint plays. K episodes, H rows of a
waypoint table, S state.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.episodes import rollouts
from actors.vector_rollout import Rollout
from m3pc.core.env_ids import split_env_name
from m3pc.core.manipulation_tasks import TASKS
from m3pc.core.progress import OnProgress, ignore_progress
from m3pc.core.seeding import evaluation_episode
from m3pc.envs import engine, make, make_vector, normalised_score
from m3pc.envs.registry import FloatVectorEnv
from m3pc.envs.subproc_vector import SubprocVectorEnv
from m3pc.evaluation.statistics import wilson_interval
from m3pc.types import Booleans, Decision, Doubles, Floats, InputError, Integers, Planner

# Arrays of an Evaluation: their keys in JSON.
JSON_COLUMNS = {
    "returns": "returns",
    "effective_candidates": "effective",
    "utility_std": "spread",
    "first_target_returns": "first_conditions",
    "mean_target_returns": "mean_conditions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """K episodes of one planner, in the order of their numbers."""

    env_id: str
    engine: str  # simulator's name and version, on which scores depend
    seed: int
    returns: Doubles  # [K]
    lengths: Integers  # [K]
    effective_candidates: Doubles  # [K] mean over decisions; NaN without planning
    utility_std: Doubles  # [K] mean over decisions; NaN without planning
    first_target_returns: Doubles  # [K] at step 0; NaN without a target
    mean_target_returns: Doubles  # [K] mean over decisions
    decisions: int
    seconds: float  # planning and simulation together

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean return; NaN for a single episode."""
        if len(self.returns) == 1:
            return math.nan
        return float(self.returns.std(ddof=1)) / math.sqrt(len(self.returns))

    @property
    def score(self) -> float | None:
        """The mean return on D4RL's scale; None where D4RL has no reference."""
        return normalised_score(self.env_id, self.mean)

    @property
    def score_error(self) -> float | None:
        zero, error = (normalised_score(self.env_id, value) for value in (0, self.standard_error))
        return None if zero is None or error is None else error - zero  # a score is linear

    @property
    def successes(self) -> Booleans | None:
        """[K] whether the task succeeded; None where the environment does not define success."""
        if split_env_name(self.env_id)[0] not in TASKS:
            return None
        done: Booleans = self.returns > 0  # the only reward is 1, for success
        return done

    @property
    def success_rate(self) -> float | None:
        return None if self.successes is None else float(self.successes.mean())

    @property
    def success_interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the rate."""
        if self.successes is None:
            return None
        return wilson_interval(int(self.successes.sum()), len(self.successes))

    @property
    def decisions_per_second(self) -> float:
        return self.decisions / self.seconds if self.seconds > 0 else math.nan

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, None for NaN, which JSON lacks."""
        success: dict[str, Any] = {}
        if self.successes is not None:
            success = {
                "success_rate": self.success_rate,
                "success_interval": self.success_interval,
                "successes": self.successes.tolist(),
            }
        return {
            "env": self.env_id,
            "engine": self.engine,
            "seed": self.seed,
            "episodes": len(self.returns),
            "mean": _plain(self.mean),
            "standard_error": _plain(self.standard_error),
            "score": _plain(self.score),
            "score_error": _plain(self.score_error),
            "decisions": self.decisions,
            "seconds": _plain(self.seconds),
            "decisions_per_second": _plain(self.decisions_per_second),
            "returns": _plain(self.returns.tolist()),
            "lengths": self.lengths.tolist(),
            **success,
            "effective": _plain(self.effective_candidates.tolist()),
            "spread": _plain(self.utility_std.tolist()),
            "first_conditions": _plain(self.first_target_returns.tolist()),
            "mean_conditions": _plain(self.mean_target_returns.tolist()),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Evaluation":
        """The inverse of `as_json`."""
        return cls(
            env_id=row["env"],
            engine=row["engine"],
            seed=row["seed"],
            lengths=np.array(row["lengths"], np.int64),
            decisions=row["decisions"],
            seconds=math.nan if row["seconds"] is None else row["seconds"],
            # None becomes NaN.
            **{name: np.array(row[key], np.float64) for name, key in JSON_COLUMNS.items()},
        )


def evaluate(
    env_id: str,
    planner: Planner,
    *,
    episodes: int,
    seed: int,
    slots: int,
    processes: int = 1,
    waypoints: Floats | None = None,
    on_progress: OnProgress = ignore_progress,
    clock: Callable[[], float] = time.perf_counter,
    **kwargs: Any,
) -> Evaluation:
    """Play the episodes 0, 1, ... of `seed`, up to `slots` together. `kwargs` go to gymnasium.make.

    If the planner decides each row independently, the results do not depend on `slots`. They
    never depend on `processes`.
    """
    if episodes < 1:
        raise InputError(f"{episodes} episodes were asked for; give 1 or more")
    starts = (evaluation_episode(seed, number) for number in range(episodes))
    with closing(make(env_id, **kwargs)) as env:
        engine_name = engine(env)
    table = _EpisodeTable(episodes, on_progress)
    with closing(make_envs(env_id, min(slots, episodes), processes, **kwargs)) as envs:
        began = clock()
        for rollout in rollouts(
            envs, planner, starts, waypoints=waypoints, on_step=table.count_decisions
        ):
            table.add(rollout)
        seconds = clock() - began
    return table.evaluation(env_id, engine_name, seed, seconds)


class _EpisodeTable:
    """One row of numbers per episode; the episodes themselves are not kept."""

    def __init__(self, episodes: int, on_progress: OnProgress) -> None:
        self._episodes, self._on_progress = episodes, on_progress
        self._rows: dict[int, tuple[float, ...]] = {}
        self._decisions, self._total = 0, 0.0

    def count_decisions(self, envs: FloatVectorEnv, decision: Decision) -> None:
        self._decisions += len(decision.actions)
        self._report()

    def add(self, rollout: Rollout) -> None:
        self._rows[rollout.number] = (
            float(rollout.episode.rewards.sum(dtype=np.float64)),
            len(rollout.episode),
            float(rollout.planning.effective_candidates.mean(dtype=np.float64)),
            float(rollout.planning.utility_std.mean(dtype=np.float64)),
            float(rollout.planning.target_returns[0]),
            float(rollout.planning.target_returns.mean(dtype=np.float64)),
        )
        self._total += self._rows[rollout.number][0]
        self._report()

    def _report(self) -> None:
        played = len(self._rows)
        mean = {"mean return": self._total / played} if played else {}
        counts = {"episodes": played, "of": self._episodes, "decisions": self._decisions}
        self._on_progress({**counts, **mean})

    def evaluation(self, env_id: str, engine_name: str, seed: int, seconds: float) -> Evaluation:
        columns = np.array([self._rows[number] for number in range(self._episodes)]).T
        returns, lengths, effective_candidates, utility_std, first_targets, mean_targets = columns
        return Evaluation(
            env_id=env_id,
            engine=engine_name,
            seed=seed,
            returns=returns,
            lengths=lengths.astype(np.int64),
            effective_candidates=effective_candidates,
            utility_std=utility_std,
            first_target_returns=first_targets,
            mean_target_returns=mean_targets,
            decisions=self._decisions,
            seconds=seconds,
        )


def make_envs(env_id: str, slots: int, processes: int, **kwargs: Any) -> FloatVectorEnv:
    """Environments that step together, in child processes if `processes` is above 1."""
    if processes > 1:
        return SubprocVectorEnv(env_id, slots, processes=processes, **kwargs)
    return make_vector(env_id, slots, **kwargs)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value if value is None or math.isfinite(value) else None
