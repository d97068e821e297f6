"""What is answered when nothing can be done: one shape for all, RFC 9457's."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from m3pc.config.strict_yaml import plain, shown
from m3pc.serving.messages import TAGS, Problem
from m3pc.serving.sessions import ConflictError, NoRoomError, UnknownSessionError
from m3pc.types import InputError

KIND = "application/problem+json"
RETRY_SECONDS = 1
# What a user's error is to HTTP.
STATUSES: Mapping[type[InputError], HTTPStatus] = {
    ConflictError: HTTPStatus.CONFLICT,
    UnknownSessionError: HTTPStatus.NOT_FOUND,
    NoRoomError: HTTPStatus.SERVICE_UNAVAILABLE,
}


class ProblemError(Exception):
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
        told = Problem(
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            where=self.where,
            expected_step=self.expected_step,
        )
        content = told.model_dump_json()
        return Response(content, self.status, headers=self.headers, media_type=KIND)


def of_input(error: InputError) -> ProblemError:
    status = STATUSES.get(type(error), HTTPStatus.UNPROCESSABLE_ENTITY)
    expected = error.expected if isinstance(error, ConflictError) else None
    return ProblemError(status, str(error), expected_step=expected)


def of_message(error: ValidationError) -> ProblemError:
    """The first field that is wrong: what was found, what is expected."""
    first = error.errors(include_url=False)[0]
    where = _place(first["loc"])
    subject = where or "the message"
    if first["type"] == "json_invalid":
        detail = f"the message is no JSON: {plain(str(first['ctx']['error']))}"
    elif first["type"] == "missing":
        detail = f"{subject} is missing; give it"
    elif first["type"] == "extra_forbidden":
        detail = f"{subject} is no field of this message; leave it out"
    else:
        detail = f"{subject} is {_found(first['input'])}: {first['msg']}"
    return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, detail, where=where)


def _place(parts: tuple[Any, ...]) -> str | None:
    """observation[3], without the kind of session that pydantic puts in front."""
    if parts and parts[0] in TAGS and len(parts) != 1:
        parts = parts[1:]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return plain(text.lstrip(".")) or None


def _found(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, no finite number"
    return shown(tuple(value) if isinstance(value, list) else value)
