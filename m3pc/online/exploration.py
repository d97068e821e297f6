"""Returns of the episodes that a run collected, in the order of arrival.

K is the number of episodes that terminated or were truncated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m3pc.envs import normalised_score
from m3pc.online.run_folder import OnlineRun
from m3pc.plots import RunPanel, exploration
from m3pc.tracking.run_log import read_metrics
from m3pc.types import InputError, Integers
from replay.format import manifest
from replay.store.store import Store

PARTS = 3  # a report divides the environment steps of a run into so many parts


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePart:
    """The episodes that ended between two counts of environment steps."""

    begin: int
    end: int
    episodes: int
    mean: float  # NaN if there is no episode
    best: float
    above: float  # share of episodes better than the offline level; NaN if that is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    name: str
    explorer: str  # how the run explored, for a title
    unit: str  # unit of `returns` and `offline`
    steps: int  # environment steps, including those of aborted episodes
    ends: Integers  # [K] environment steps of the run when the episode ended
    returns: NDArray[np.float64]  # [K]
    aborted: int  # number of aborted episodes, which are left out
    offline: float | None  # mean return of the first evaluation, before the first update

    def parts(self) -> list[CurvePart]:
        """The run in PARTS equal parts."""
        edges = np.linspace(0, self.steps, PARTS + 1).round().astype(np.int64).tolist()
        return [self._part(*pair) for pair in pairwise(edges)]

    def _part(self, begin: int, end: int) -> CurvePart:
        returns = self.returns[(self.ends > begin) & (self.ends <= end)]
        above = returns > (np.nan if self.offline is None else self.offline)
        unknown = self.offline is None or not len(returns)
        return CurvePart(
            begin=begin,
            end=end,
            episodes=len(returns),
            mean=float(returns.mean()) if len(returns) else np.nan,
            best=float(returns.max()) if len(returns) else np.nan,
            above=np.nan if unknown else float(above.mean()),
        )

    def panel(self) -> RunPanel:
        return RunPanel(
            title=f"{self.name}: {self.explorer}",
            ends=self.ends,
            values=self.returns,
            steps=self.steps,
            level=self.offline,
        )


def read_exploration(run: OnlineRun) -> Exploration:
    """Read the run's store and first evaluation, as D4RL scores if the environment has them."""
    if not (run.replay / manifest.NAME).exists():
        raise InputError(f"{run.path} has collected nothing yet; start it with m3pc resume")
    store = Store(run.replay)
    aborted = np.concatenate(
        [np.empty(0, np.bool_), *(~(s.terminated | s.truncated) for s in store.segments)]
    )
    ends, noise = store.lengths.cumsum(), run.config.online.noise
    return Exploration(
        name=run.path.resolve().name,
        explorer=f"noise {noise:g}" if noise else f"planner {run.config.planner.mode}",
        unit=score_unit(run),
        steps=int(store.lengths.sum()),
        ends=ends[~aborted],
        returns=np.array([scaled(run, x) for x in store.episode_returns[~aborted]], np.float64),
        aborted=int(aborted.sum()),
        offline=offline_level(run),
    )


def offline_level(run: OnlineRun) -> float | None:
    """Mean return of the evaluation before the first update; None if there was none."""
    rows = [row for row in read_metrics(run.path, "evaluation") if not row["updates"]]
    return scaled(run, rows[0]["return"]) if rows else None


def score_unit(run: OnlineRun) -> str:
    """The unit of a `scaled` return."""
    return "return" if normalised_score(run.info.env, 0.0) is None else "score"


def scaled(run: OnlineRun, episode_return: float) -> float:
    """A return as a D4RL score, or unchanged if the environment has none."""
    score = normalised_score(run.info.env, episode_return)
    return episode_return if score is None else score


def draw_exploration(runs: Sequence[Exploration], png: Path) -> None:
    """Returns by environment step, one panel for each run; all must have the same unit."""
    (unit,) = {run.unit for run in runs}
    exploration(png, [run.panel() for run in runs], unit=unit)
