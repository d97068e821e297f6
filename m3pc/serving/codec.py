"""Messages as JSON or as msgpack, by Content-Type; an answer comes as its question did.

In msgpack, states and actions are binary strings: float32, little-endian, end to end.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgpack
import numpy as np
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from m3pc.serving.messages import Message
from m3pc.serving.problems import ProblemError, of_message

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
VECTORS: Final = (
    "observation",
    "goal",
    "action",
)  # fields that are arrays; waypoints are a list of them
DEEPEST: Final = 4  # a message, its waypoints, one of them, and one more to be told about
MOST_FIELDS: Final = 64
FLOAT: Final = np.dtype("<f4")

M = TypeVar("M", bound=Message)


def content_kind(headers: Mapping[str, str]) -> str:
    kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind not in (JSON, MSGPACK):
        raise ProblemError(
            415, f"Content-Type is {kind[:80]!r}; give {JSON} or {MSGPACK}", where="Content-Type"
        )
    return kind


def decoded(content: bytes, kind: str, of: TypeAdapter[M]) -> M:
    try:
        if kind == JSON:
            _require_few(content.count(b":"))  # a text of ours has none
            return of.validate_json(content)
        return of.validate_python(_unpacked(content))
    except ValidationError as error:
        raise of_message(error) from None


def encoded(message: Message, kind: str, status: int = 200) -> Response:
    if kind == JSON:
        return Response(message.model_dump_json(), status, media_type=JSON)
    found = message.model_dump()
    if "action" in found:
        found["action"] = np.asarray(found["action"], FLOAT).tobytes()
    return Response(msgpack.packb(found), status, media_type=MSGPACK)


def _unpacked(content: bytes) -> Any:
    try:
        found = msgpack.unpackb(content)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProblemError(422, f"the message is no msgpack: {str(error)[:200]}") from None
    _require_flat(found)
    if not isinstance(found, dict):
        return found
    _require_few(len(found))
    for name in VECTORS:
        if name in found:
            found[name] = _numbers(found[name], name)
    if isinstance(found.get("waypoints"), list):
        rows = enumerate(found["waypoints"])
        found["waypoints"] = [_numbers(row, f"waypoints[{n}]") for n, row in rows]
    return found


def _require_few(fields: int) -> None:
    """Each that is unknown would be a fault of its own, and all would be listed."""
    if fields > MOST_FIELDS:
        detail = f"the message has more than {MOST_FIELDS} fields; no message has as many"
        raise ProblemError(422, detail)


def _require_flat(found: Any) -> None:
    """Else whoever judges it, or tells what is wrong, would come to Python's limit of calls."""
    level = [[found]]
    for _ in range(1 + DEEPEST):
        inner = [x for each in level for x in each if isinstance(x, list | dict)]
        if not inner:
            return
        level = [list(x.values()) if isinstance(x, dict) else x for x in inner]
    raise ProblemError(422, f"the message is nested more than {DEEPEST} deep; no message is")


def _numbers(found: object, where: str) -> object:
    """Those of a binary string; anything else is left to be judged."""
    if not isinstance(found, bytes):
        return found
    if len(found) % FLOAT.itemsize:
        detail = f"{where} has {len(found)} bytes; give 4 for each number, as float32"
        raise ProblemError(422, detail, where=where)
    return np.frombuffer(found, FLOAT).tolist()
