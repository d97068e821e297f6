"""A planner elsewhere: it is asked, and answers when somebody waits for it."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import repeat

import numpy as np

from m3pc.types import Decision, PlannerGoneError, PlanRequest
from tests.support.fakes.fake_planner import FakePlanner


class SlowPlanner:
    """Asks. Remembers the requests, and those that are open."""

    def __init__(
        self, actions: int = 1, *, versions: Iterator[int] | None = None, gone: int = 0
    ) -> None:
        """The first `gone` requests are never answered. A version an answer."""
        self.planner = FakePlanner(actions, versions or repeat(3))
        self.asks: list[PlanRequest] = []
        self.open: list[PlanRequest] = []
        self.answered = 0
        self.gone = gone
        self.spoil = 0  # makes the answer with this number NaN, from 1

    def ask(self, ask: PlanRequest) -> "Waiting":
        self.asks.append(ask)
        self.open.append(ask)
        return Waiting(self, ask)


@dataclasses.dataclass
class Waiting:
    planner: SlowPlanner
    ask: PlanRequest

    def result(self, patience: float, stop: Callable[[], bool]) -> Decision:
        planner = self.planner
        planner.open = [ask for ask in planner.open if ask is not self.ask]
        if planner.gone:
            planner.gone -= 1
            raise PlannerGoneError("nobody there")
        planner.answered += 1
        decision = planner.planner.decide(self.ask.window, explore=self.ask.explore)
        if planner.answered == planner.spoil:
            return dataclasses.replace(decision, actions=np.full_like(decision.actions, np.nan))
        return decision
