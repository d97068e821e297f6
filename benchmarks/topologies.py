"""Alternatives to one planner server that batches, to compare with. E environments.

All are `PlannerEndpoint`s: the same rollout processes take any of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from m3pc.types import Decision, PendingDecision, PlanRequest
from planner.requests import DECISION_FIELDS, answer_in_chunks, select_rows
from planner.server.client import PlannerClient


@dataclass(frozen=True, slots=True)
class EachAlone:
    """A request for each environment; all are sent before the first reply is awaited."""

    client: PlannerClient

    @property
    def window(self) -> int:
        return self.client.window

    @property
    def horizon(self) -> int:
        return self.client.horizon

    def ask(self, ask: PlanRequest) -> "AllOf":
        rows = (select_rows(ask.window, slice(row, row + 1)) for row in range(len(ask.window)))
        return AllOf([self.client.ask(replace(ask, window=window)) for window in rows])


@dataclass(frozen=True, slots=True)
class AllOf:
    pending: Sequence[PendingDecision]

    def result(self, patience: float, stop: Callable[[], bool]) -> Decision:
        decisions = [pending.result(patience, stop) for pending in self.pending]
        rows = {
            name: np.concatenate([getattr(decision, name) for decision in decisions])
            for name in DECISION_FIELDS
        }
        return Decision(**rows, version=decisions[0].version)


@dataclass(frozen=True)
class Inside:
    """The rollout process plans itself, for one environment after the other. It loads torch."""

    source: str  # path of a checkpoint
    window: int
    horizon: int

    def ask(self, ask: PlanRequest) -> "Later":
        return Later(self._decide, ask)

    def _decide(self, ask: PlanRequest) -> Decision:
        return answer_in_chunks(self._answer, [ask], 1)[0]

    @cached_property
    def _answer(self) -> Callable[[Sequence[PlanRequest]], list[Decision]]:
        from m3pc.model import checkpoint
        from m3pc.model.device import prepare_compute
        from planner.policy import Policy

        policy = Policy(checkpoint.read(self.source).weights)
        prepare_compute(policy.config.compute)
        return policy.answer


@dataclass(frozen=True, slots=True)
class Later:
    decide: Callable[[PlanRequest], Decision]
    ask: PlanRequest

    def result(self, patience: float, stop: Callable[[], bool]) -> Decision:
        return self.decide(self.ask)
