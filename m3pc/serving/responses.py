"""What the planner decided, in the words that a robot is told."""

import math

from m3pc.serving.messages import ActionResponse
from m3pc.serving.problems import ProblemError
from m3pc.serving.sessions import StepAnswer
from m3pc.types import Floats, Rejection, RejectReason, Version


def acted(step: int, answer: StepAnswer) -> ActionResponse:
    decision = answer.decision
    return ActionResponse(
        step=step,
        action=decision.actions[0].tolist(),
        version=str(Version.unpacked(decision.version)),
        candidates=answer.candidates,
        hurried=answer.hurried,
        effective=_number(decision.effective_candidates),
        utility=_number(decision.utilities),
        condition=_number(decision.target_returns),
        milliseconds=round(1000 * answer.seconds, 3),
        deadline_ms=1000 * answer.deadline,
        late=answer.late,
    )


def refused(reply: Rejection) -> ProblemError:
    if reply.why == RejectReason.BAD:
        return ProblemError(422, reply.reason)
    seconds = str(max(1, math.ceil(reply.wait)))
    return ProblemError(503, f"{reply.reason}; ask again", headers={"Retry-After": seconds})


def _number(found: Floats) -> float | None:
    value = float(found[0])
    return value if math.isfinite(value) else None
