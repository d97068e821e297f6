"""Every error is answered by a problem document (RFC 9457)."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic import ValidationError
from starlette.responses import Response

from m3pc.config.strict_yaml import plain, shown
from m3pc.serving.messages import OPENING_TAGS, Problem
from m3pc.serving.sessions import SessionLimitError, StepConflictError, UnknownSessionError
from m3pc.types import InputError

PROBLEM_JSON: Final = "application/problem+json"
RETRY_SECONDS: Final = 1
STATUSES: Final[Mapping[type[InputError], HTTPStatus]] = {  # other InputErrors: 422
    StepConflictError: HTTPStatus.CONFLICT,
    UnknownSessionError: HTTPStatus.NOT_FOUND,
    SessionLimitError: HTTPStatus.SERVICE_UNAVAILABLE,
}


class ProblemError(Exception):
    """A request that is answered by a problem document."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        where: str | None = None,
        expected_step: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers or {})
        self.where, self.expected_step = where, expected_step
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.headers.setdefault("Retry-After", str(RETRY_SECONDS))

    def response(self) -> Response:
        problem = Problem(
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            where=self.where,
            expected_step=self.expected_step,
        )
        content = problem.model_dump_json()
        return Response(content, self.status, headers=self.headers, media_type=PROBLEM_JSON)


def problem_of_input(error: InputError) -> ProblemError:
    status = STATUSES.get(type(error), HTTPStatus.UNPROCESSABLE_ENTITY)
    expected = error.expected if isinstance(error, StepConflictError) else None
    return ProblemError(status, str(error), expected_step=expected)


def problem_of_message(error: ValidationError) -> ProblemError:
    """Describe the first wrong field: its value, and what was expected."""
    first = error.errors(include_url=False)[0]
    where = _field_path(first["loc"])
    subject = where or "the message"
    if first["type"] == "json_invalid":
        detail = f"the message is no JSON: {plain(str(first['ctx']['error']))}"
    elif first["type"] == "missing":
        detail = f"{subject} is missing; give it"
    elif first["type"] == "extra_forbidden":
        detail = f"{subject} is no field of this message; leave it out"
    else:
        detail = f"{subject} is {_shown_input(first['input'])}: {first['msg']}"
    return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, detail, where=where)


def _field_path(parts: tuple[Any, ...]) -> str | None:
    """Format a path such as observation[3], without the opening's tag that pydantic prepends."""
    if parts and parts[0] in OPENING_TAGS and len(parts) != 1:
        parts = parts[1:]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return plain(text.lstrip(".")) or None


def _shown_input(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, no finite number"
    return shown(tuple(value) if isinstance(value, list) else value)
