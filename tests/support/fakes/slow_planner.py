"""A planner in another process: it decides when a caller waits for the result."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import repeat

import numpy as np

from m3pc.types import Decision, PlannerGoneError, PlanRequest
from tests.support.fakes.fake_planner import FakePlanner


class SlowPlanner:
    """A PlannerEndpoint. Remembers the requests, and those that are open."""

    window, horizon = FakePlanner.window, FakePlanner.horizon

    def __init__(
        self, actions: int = 1, *, versions: Iterator[int] | None = None, gone: int = 0
    ) -> None:
        """The first `gone` requests are never answered; each decision takes one of `versions`."""
        self.planner = FakePlanner(actions, versions or repeat(3))
        self.requests: list[PlanRequest] = []
        self.open: list[PlanRequest] = []
        self.answered = 0
        self.gone = gone
        self.spoil = 0  # number of the decision that is NaN, from 1

    def ask(self, request: PlanRequest) -> "Waiting":
        self.requests.append(request)
        self.open.append(request)
        return Waiting(self, request)


@dataclasses.dataclass
class Waiting:
    planner: SlowPlanner
    request: PlanRequest

    def result(self, patience: float, stop: Callable[[], bool]) -> Decision:
        planner = self.planner
        planner.open = [request for request in planner.open if request is not self.request]
        if planner.gone:
            planner.gone -= 1
            raise PlannerGoneError("no planner")
        planner.answered += 1
        decision = planner.planner.decide(self.request.window, explore=self.request.explore)
        if planner.answered == planner.spoil:
            return dataclasses.replace(decision, actions=np.full_like(decision.actions, np.nan))
        return decision
