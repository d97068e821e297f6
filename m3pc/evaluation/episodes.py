"""How well a planner does: episodes that depend on a seed alone, and what they come to.

K episodes, H rows of a waypoint table, S state.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.episodes import rollouts
from actors.vector_rollout import Rollout
from m3pc.core.env_ids import parted
from m3pc.core.manipulation_tasks import TASKS
from m3pc.core.seeding import evaluation_episode
from m3pc.envs import engine, make, make_vector, normalised_score
from m3pc.envs.registry import FloatVectorEnv
from m3pc.envs.subproc_vector import SubprocVectorEnv
from m3pc.types import Decision, Floats, InputError, Integers, Planner

Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]
Report = Callable[[Mapping[str, Any]], None]
QUANTILE = 1.959964  # 97.5 % of the standard normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """K episodes of one planner, in the order of their numbers."""

    env_id: str
    engine: str  # name and version: scores of another physics are other scores
    seed: int
    returns: Doubles  # [K]
    lengths: Integers  # [K]
    effective: Doubles  # [K] effective candidates, mean over decisions; NaN without planning
    spread: Doubles  # [K] of the utilities, mean over decisions; NaN without planning
    first_conditions: Doubles  # [K] return asked for at step 0; NaN where none was
    mean_conditions: Doubles  # [K] mean over decisions
    decisions: int
    seconds: float  # of planning and simulation together

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean return; NaN for one episode, which cannot tell."""
        if len(self.returns) == 1:
            return math.nan
        return float(self.returns.std(ddof=1)) / math.sqrt(len(self.returns))

    @property
    def score(self) -> float | None:
        """The mean on D4RL's scale; None where it has no reference."""
        return normalised_score(self.env_id, self.mean)

    @property
    def score_error(self) -> float | None:
        zero, error = (normalised_score(self.env_id, value) for value in (0, self.standard_error))
        return None if zero is None or error is None else error - zero  # a score is linear

    @property
    def successes(self) -> Flags | None:
        """[K] whether the task was done; None where the environment has no such notion."""
        if parted(self.env_id)[0] not in TASKS:
            return None
        done: Flags = self.returns > 0  # the only reward is 1, for success
        return done

    @property
    def success_rate(self) -> float | None:
        return None if self.successes is None else float(self.successes.mean())

    @property
    def success_interval(self) -> tuple[float, float] | None:
        """95 % of the rate, by Wilson."""
        if self.successes is None:
            return None
        return wilson(int(self.successes.sum()), len(self.successes))

    @property
    def decisions_per_second(self) -> float:
        return self.decisions / self.seconds if self.seconds > 0 else math.nan

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, None for NaN: JSON has no word for it."""
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
            **self._success(),
            "effective": _plain(self.effective.tolist()),
            "spread": _plain(self.spread.tolist()),
            "first_conditions": _plain(self.first_conditions.tolist()),
            "mean_conditions": _plain(self.mean_conditions.tolist()),
        }

    def _success(self) -> dict[str, Any]:
        if self.successes is None:
            return {}
        return {
            "success_rate": self.success_rate,
            "success_interval": self.success_interval,
            "successes": self.successes.tolist(),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Evaluation":
        """What `as_json` gave."""
        columns = ("returns", "effective", "spread", "first_conditions", "mean_conditions")
        return cls(
            env_id=found["env"],
            engine=found["engine"],
            seed=found["seed"],
            lengths=np.array(found["lengths"], np.int64),
            decisions=found["decisions"],
            seconds=math.nan if found["seconds"] is None else found["seconds"],
            **{name: np.array(found[name], np.float64) for name in columns},  # None becomes NaN
        )


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate: within [0, 1], and sound for few trials."""
    z2 = QUANTILE**2
    centre = (successes + z2 / 2) / (trials + z2)
    rate = successes / trials
    half = QUANTILE * math.sqrt(rate * (1 - rate) * trials + z2 / 4) / (trials + z2)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def evaluate(
    env_id: str,
    planner: Planner,
    *,
    episodes: int,
    seed: int,
    slots: int,
    window: int,
    horizon: int,
    processes: int = 1,
    waypoints: Floats | None = None,
    on_progress: Report = lambda numbers: None,
    clock: Callable[[], float] = time.perf_counter,
    **kwargs: Any,
) -> Evaluation:
    """Play the episodes 0, 1, ... of `seed`, up to `slots` together. `kwargs` go to gymnasium.make.

    If the planner answers row by row, the numbers do not depend on `slots`; they never depend on
    `processes`, over which the slots are shared out.
    """
    if episodes < 1:
        raise InputError(f"{episodes} episodes were asked for; give 1 or more")
    starts = (evaluation_episode(seed, number) for number in range(episodes))
    tally, engine_name = _EpisodeTotals(episodes, on_progress), _engine(env_id, **kwargs)
    with closing(vector(env_id, min(slots, episodes), processes, **kwargs)) as envs:
        began = clock()
        for rollout in rollouts(
            envs,
            planner,
            starts,
            window=window,
            horizon=horizon,
            waypoints=waypoints,
            on_step=tally.count,
        ):
            tally.add(rollout)
        seconds = clock() - began
    return tally.evaluation(env_id, engine_name, seed, seconds)


class _EpisodeTotals:
    """One row of numbers an episode; the episodes themselves are not kept."""

    def __init__(self, episodes: int, report: Report) -> None:
        self._episodes, self._report = episodes, report
        self._rows: dict[int, tuple[float, ...]] = {}
        self._decisions, self._total = 0, 0.0

    def count(self, envs: FloatVectorEnv, decision: Decision) -> None:
        self._decisions += len(decision.actions)
        self._show()

    def add(self, rollout: Rollout) -> None:
        self._rows[rollout.number] = (
            float(rollout.episode.rewards.sum(dtype=np.float64)),
            len(rollout.episode),
            float(rollout.effective.mean(dtype=np.float64)),
            float(rollout.spread.mean(dtype=np.float64)),
            float(rollout.conditions[0]),
            float(rollout.conditions.mean(dtype=np.float64)),
        )
        self._total += self._rows[rollout.number][0]
        self._show()

    def _show(self) -> None:
        done = len(self._rows)
        mean = {"mean return": self._total / done} if done else {}
        counts = {"episodes": done, "of": self._episodes, "decisions": self._decisions}
        self._report({**counts, **mean})

    def evaluation(self, env_id: str, engine_name: str, seed: int, seconds: float) -> Evaluation:
        columns = np.array([self._rows[number] for number in range(self._episodes)]).T
        returns, lengths, effective, spread, first_conditions, mean_conditions = columns
        return Evaluation(
            env_id=env_id,
            engine=engine_name,
            seed=seed,
            returns=returns,
            lengths=lengths.astype(np.int64),
            effective=effective,
            spread=spread,
            first_conditions=first_conditions,
            mean_conditions=mean_conditions,
            decisions=self._decisions,
            seconds=seconds,
        )


def vector(env_id: str, slots: int, processes: int, **kwargs: Any) -> FloatVectorEnv:
    """Environments stepped together, shared out over processes where there are several."""
    if processes > 1:
        return SubprocVectorEnv(env_id, slots, processes=processes, **kwargs)
    return make_vector(env_id, slots, **kwargs)


def _engine(env_id: str, **kwargs: Any) -> str:
    with closing(make(env_id, **kwargs)) as env:
        return engine(env)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value if value is None or math.isfinite(value) else None
