"""Builds one episode step by step. L steps so far, S state, A action."""

import math
from typing import NamedTuple

import numpy as np

from m3pc.types import Decision, Episode, Floats


class PlanningTrace(NamedTuple):
    """What the planner reported at each step of an episode (see `Decision`)."""

    target_returns: Floats  # [L]
    utilities: Floats  # [L]
    effective_candidates: Floats  # [L]
    utility_std: Floats  # [L]


class EpisodeRecorder:
    """Keeps every step of one episode, for the store. (A `HistoryBuffer` keeps the last few, for
    the planner.)"""

    def __init__(self, first_state: Floats, *, seed: int) -> None:
        self._seed = seed
        self._states = [first_state]
        self._actions: list[Floats] = []
        self._rewards: list[float] = []
        self._planned: list[tuple[np.float32, ...]] = []  # the rows of a PlanningTrace
        self._versions: list[int] = []

    def __len__(self) -> int:
        return len(self._actions)

    def add(
        self,
        action: Floats,
        reward: float,
        next_state: Floats,
        decision: Decision | None = None,
        row: int = 0,
    ) -> None:
        """Add a step. Row `row` of the decision is this environment's."""
        self._actions.append(action)
        self._rewards.append(reward)
        self._states.append(next_state)
        if decision is not None:
            self._versions.append(decision.version)
            self._planned.append(
                (
                    decision.target_returns[row],
                    decision.utilities[row],
                    decision.effective_candidates[row],
                    decision.utility_std[row],
                )
            )

    def amend(self, state: Floats, action: Floats | None, reward: float | None) -> None:
        """Correct the last state, and the action and reward that led to it, if any."""
        self._states[-1] = state
        if self._actions:
            assert action is not None and reward is not None, "the last step has no action"
            self._actions[-1], self._rewards[-1] = action, reward

    def copy(self) -> "EpisodeRecorder":
        """An independent recorder with the same steps."""
        other = EpisodeRecorder(self._states[0], seed=self._seed)
        other._states, other._versions = [*self._states], [*self._versions]
        other._actions, other._rewards = [*self._actions], [*self._rewards]
        other._planned = [*self._planned]
        return other

    def trace(self) -> PlanningTrace:
        """The trace. Every step must have been recorded with its decision."""
        return PlanningTrace(*np.array(self._planned, np.float32).T.copy())

    def episode(self, *, terminated: bool, truncated: bool) -> Episode:
        """The episode so far (at least one step). Its utility is the mean over planned steps."""
        utilities = np.array([numbers[1] for numbers in self._planned], np.float64)
        planned = utilities[np.isfinite(utilities)]
        return Episode(
            states=np.stack(self._states),
            actions=np.stack(self._actions).astype(np.float32, copy=False),
            rewards=np.asarray(self._rewards, np.float32),
            terminated=terminated,
            truncated=truncated,
            seed=self._seed,
            version=self._versions[0] if self._versions else -1,
            last_version=self._versions[-1] if self._versions else -1,
            target_return=float(self._planned[0][0]) if self._planned else math.nan,
            utility=float(planned.mean()) if len(planned) else math.nan,
        )
