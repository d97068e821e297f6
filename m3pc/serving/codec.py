"""Messages are JSON or msgpack, by Content-Type; a response is encoded like its request.

In msgpack, states and actions are binary strings of little-endian float32.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgpack
import numpy as np
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from m3pc.serving.messages import Message
from m3pc.serving.problems import ProblemError, problem_of_message

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
VECTORS: Final = ("observation", "goal", "action")  # array fields; waypoints is a list of arrays
MAX_DEPTH: Final = 4  # message, waypoints, one waypoint; validation reports a fourth level
MAX_FIELDS: Final = 64
FLOAT: Final = np.dtype("<f4")

M = TypeVar("M", bound=Message)


def content_kind(headers: Mapping[str, str]) -> str:
    """Return JSON or MSGPACK; any other Content-Type raises problem 415."""
    kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind not in (JSON, MSGPACK):
        raise ProblemError(
            415, f"Content-Type is {kind[:80]!r}; give {JSON} or {MSGPACK}", where="Content-Type"
        )
    return kind


def decoded(content: bytes, kind: str, message: TypeAdapter[M]) -> M:
    """Return the validated message; an invalid one raises problem 422."""
    try:
        if kind == JSON:
            _check_field_count(content.count(b":"))  # no string of a valid message has a colon
            return message.validate_json(content)
        return message.validate_python(_unpacked(content))
    except ValidationError as error:
        raise problem_of_message(error) from None


def encoded(message: Message, kind: str, status: int = 200) -> Response:
    if kind == JSON:
        return Response(message.model_dump_json(), status, media_type=JSON)
    fields = message.model_dump()
    if "action" in fields:
        fields["action"] = np.asarray(fields["action"], FLOAT).tobytes()
    return Response(msgpack.packb(fields), status, media_type=MSGPACK)


def _unpacked(content: bytes) -> Any:
    try:
        fields = msgpack.unpackb(content)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProblemError(422, f"the message is no msgpack: {str(error)[:200]}") from None
    _check_depth(fields)
    if not isinstance(fields, dict):
        return fields
    _check_field_count(len(fields))
    for name in VECTORS:
        if name in fields:
            fields[name] = _numbers(fields[name], name)
    if isinstance(fields.get("waypoints"), list):
        rows = enumerate(fields["waypoints"])
        fields["waypoints"] = [_numbers(row, f"waypoints[{n}]") for n, row in rows]
    return fields


def _check_field_count(count: int) -> None:
    """Limit the fields, because validation would collect an error for each unknown one."""
    if count > MAX_FIELDS:
        detail = f"the message has more than {MAX_FIELDS} fields; no message has as many"
        raise ProblemError(422, detail)


def _check_depth(value: Any) -> None:
    """Refuse deep values: validating or reporting them exceeds Python's recursion limit."""
    level = [[value]]
    for _ in range(1 + MAX_DEPTH):
        inner = [item for items in level for item in items if isinstance(item, list | dict)]
        if not inner:
            return
        level = [list(item.values()) if isinstance(item, dict) else item for item in inner]
    raise ProblemError(422, f"the message is nested more than {MAX_DEPTH} deep; no message is")


def _numbers(value: object, where: str) -> object:
    """Decode a binary string as float32 numbers; leave other values to validation."""
    if not isinstance(value, bytes):
        return value
    if len(value) % FLOAT.itemsize:
        detail = f"{where} has {len(value)} bytes; give 4 for each number, as float32"
        raise ProblemError(422, detail, where=where)
    return np.frombuffer(value, FLOAT).tolist()
