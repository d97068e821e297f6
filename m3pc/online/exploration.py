"""What a run collected while it learned: returns of its episodes, in the order of their arrival.

K episodes that the task or the clock ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m3pc.envs import normalised_score
from m3pc.online.run_folder import OnlineRun
from m3pc.plots import GoalPanel, exploration
from m3pc.tracking.run_log import read
from m3pc.types import InputError, Integers
from replay.format import manifest
from replay.store.store import Store

PARTS = 3  # of a run, by environment steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePart:
    """What was collected between two counts of environment steps."""

    begin: int
    end: int
    episodes: int
    mean: float  # NaN where there is no episode
    best: float
    above: float  # share of episodes better than the offline level; NaN where that is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    name: str
    how: str  # it explored
    unit: str  # of returns and levels
    steps: int  # in the environment, those of aborted episodes too
    ends: Integers  # [K] steps of the run at the end of each
    returns: NDArray[np.float64]  # [K]
    aborted: int  # episodes, left out
    offline: float | None  # mean return of the first evaluation, before anything was learnt

    def parts(self) -> list[CurvePart]:
        edges = np.linspace(0, self.steps, PARTS + 1).round().astype(np.int64).tolist()
        return [self._part(*pair) for pair in pairwise(edges)]

    def _part(self, begin: int, end: int) -> CurvePart:
        found = self.returns[(self.ends > begin) & (self.ends <= end)]
        above = found > (np.nan if self.offline is None else self.offline)
        unknown = self.offline is None or not len(found)
        return CurvePart(
            begin=begin,
            end=end,
            episodes=len(found),
            mean=float(found.mean()) if len(found) else np.nan,
            best=float(found.max()) if len(found) else np.nan,
            above=np.nan if unknown else float(above.mean()),
        )

    def panel(self) -> GoalPanel:
        return GoalPanel(
            title=f"{self.name}: {self.how}",
            ends=self.ends,
            values=self.returns,
            steps=self.steps,
            level=self.offline,
        )


def explored(run: OnlineRun) -> Exploration:
    """From the run's store and its first evaluation; on D4RL's scale where there is one."""
    if not (run.replay / manifest.NAME).exists():
        raise InputError(f"{run.path} has collected nothing yet; start it with m3pc resume")
    store = Store(run.replay)
    cut = np.concatenate(
        [np.empty(0, np.bool_), *(~(s.terminated | s.truncated) for s in store.segments)]
    )
    ends, noise = store.lengths.cumsum(), run.config.online.noise
    return Exploration(
        name=run.path.resolve().name,
        how=f"noise {noise:g}" if noise else f"planner {run.config.planner.mode}",
        unit=score_unit(run),
        steps=int(store.lengths.sum()),
        ends=ends[~cut],
        returns=np.array([scaled(run, x) for x in store.episode_returns[~cut]], np.float64),
        aborted=int(cut.sum()),
        offline=offline_level(run),
    )


def offline_level(run: OnlineRun) -> float | None:
    """None where nothing was evaluated before the first update."""
    rows = [row for row in read(run.path, "evaluation") if not row["updates"]]
    return scaled(run, rows[0]["return"]) if rows else None


def score_unit(run: OnlineRun) -> str:
    """What `scaled` gives."""
    return "return" if normalised_score(run.facts.env, 0.0) is None else "score"


def scaled(run: OnlineRun, episode_return: float) -> float:
    score = normalised_score(run.facts.env, episode_return)
    return episode_return if score is None else score


def draw(found: Sequence[Exploration], png: Path) -> None:
    (unit,) = {one.unit for one in found}
    exploration(png, [one.panel() for one in found], unit=unit)
