"""Other ways to ask for actions than through one planner server, to compare with. E environments.

All are `Asks`: the same rollout processes take any of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from m3pc.types import Decision, PendingDecision, PlanRequest
from planner.requests import DECISION, in_pieces, some
from planner.server.client import PlannerClient


@dataclass(frozen=True, slots=True)
class EachAlone:
    """A call for every environment: all of them are sent before the first answer is awaited."""

    client: PlannerClient

    def ask(self, ask: PlanRequest) -> "AllOf":
        rows = (some(ask.window, slice(row, row + 1)) for row in range(len(ask.window)))
        return AllOf([self.client.ask(replace(ask, window=window)) for window in rows])


@dataclass(frozen=True, slots=True)
class AllOf:
    pending: Sequence[PendingDecision]

    def result(self, patience: float, stop: Callable[[], bool]) -> Decision:
        found = [each.result(patience, stop) for each in self.pending]
        rows = {name: np.concatenate([getattr(each, name) for each in found]) for name in DECISION}
        return Decision(**rows, version=found[0].version)


@dataclass(frozen=True)
class Inside:
    """The process plans by itself, for one environment after the other. It loads torch."""

    source: str  # path of a checkpoint

    def ask(self, ask: PlanRequest) -> "Later":
        return Later(self._decide, ask)

    def _decide(self, ask: PlanRequest) -> Decision:
        return in_pieces(self._answer, [ask], 1)[0]

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
