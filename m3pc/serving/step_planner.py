"""Requests one step's plan from the planner, with a deadline, and measures the answer."""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from m3pc.serving.problems import ProblemError
from m3pc.serving.service_spec import ServiceSpec
from m3pc.serving.sessions import StepAnswer
from m3pc.telemetry.catalogue import SERVED_CANDIDATES, SERVED_SECONDS, SERVED_STEPS
from m3pc.telemetry.recorder import Recorder
from m3pc.types import PlanRequest, Rejection, RejectReason
from planner.latency_model import UNPLANNED_MODES
from planner.server.service import PlannerService

HARD_DEADLINE: Final = 10.0  # seconds until the planner gives up; a longer deadline wins


class StepPlanner:
    def __init__(
        self,
        planner: PlannerService,
        spec: ServiceSpec,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._planner, self._spec = planner, spec
        self._recorder, self._clock = recorder, clock

    async def plan(self, request: PlanRequest, deadline: float, arrived: float) -> StepAnswer:
        """Aim to answer `deadline` seconds after `arrived`, a time of `clock`. Late answers are
        returned, too. ProblemError if the planner refuses or does not answer at all."""
        scheduled: list[PlanRequest] = []  # the request, its candidates fitted to the deadline
        hard_deadline = max(HARD_DEADLINE, deadline)
        soft_deadline = deadline - (self._clock() - arrived)
        future = self._planner.submit(
            request, hard_deadline, soft_deadline=soft_deadline, on_scheduled=scheduled.append
        )
        ready: list[float] = []
        future.add_done_callback(lambda _: ready.append(self._clock()))
        try:
            reply = await asyncio.wait_for(asyncio.wrap_future(future), 2 * hard_deadline)
        except TimeoutError:
            raise ProblemError(503, "the planner did not answer; ask again") from None
        if isinstance(reply, Rejection):
            self._recorder.add(SERVED_STEPS, label="refused")
            raise _rejection_problem(reply)
        now = self._clock()
        if self._planner.latency_model is not None:
            self._planner.latency_model.observe_reply(now - ready[0])
        seconds, late = now - arrived, now - arrived > deadline
        requested, used = self._candidates(request), self._candidates(scheduled[-1])
        self._recorder.add(SERVED_STEPS, label="late" if late else "ok")
        self._recorder.observe(SERVED_SECONDS, seconds)
        if requested:
            self._recorder.observe(SERVED_CANDIDATES, used)
        return StepAnswer(
            decision=reply,
            candidates=used,
            hurried=used < requested,
            seconds=seconds,
            deadline=deadline,
            late=late,
        )

    def _candidates(self, request: PlanRequest) -> int:
        if (request.mode or self._spec.mode) in UNPLANNED_MODES:
            return 0
        return request.candidates or self._spec.candidates


def _rejection_problem(rejection: Rejection) -> ProblemError:
    if rejection.why == RejectReason.BAD:
        return ProblemError(422, rejection.reason)
    seconds = str(max(1, math.ceil(rejection.wait)))
    return ProblemError(503, f"{rejection.reason}; ask again", headers={"Retry-After": seconds})
