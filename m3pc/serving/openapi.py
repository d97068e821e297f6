"""FastAPI's OpenAPI document, with msgpack bodies and the sizes and modes of the served model."""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from fastapi import FastAPI

from m3pc.serving.codec import JSON, MSGPACK
from m3pc.serving.messages import Problem
from m3pc.serving.problems import PROBLEM_JSON
from m3pc.serving.service_spec import ServiceSpec

ABOUT: Final = f"""\
Actions for robots, planned with a trajectory model. Open a session for each episode, report where
the robot is at each step, get its action, report how the episode ended.

Messages are {JSON}, or {MSGPACK} with the same fields, in which states and actions are binary
strings of little-endian float32. An answer has the encoding of its request; problems are always
{PROBLEM_JSON}."""


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Make the document that holds for every model; `sized` fits it to the served one."""
    # FastAPI writes integers as floats, which fuzzers and clients round wrongly.
    document: dict[str, Any] = json.loads(json.dumps(app.openapi()), parse_float=_number)
    schemas = document["components"]["schemas"]
    schemas["Problem"] = Problem.model_json_schema(mode="serialization")
    for name in ("HTTPValidationError", "ValidationError"):  # we answer with Problem
        schemas.pop(name, None)
    for operation in (each for path in document["paths"].values() for each in path.values()):
        responses = operation["responses"]
        for status in [status for status, each in responses.items() if _is_fastapis_own(each)]:
            del responses[status]
        if "requestBody" in operation:
            success = next(each for status, each in responses.items() if status.startswith("2"))
            for message in (operation["requestBody"], success):
                message["content"][MSGPACK] = {}  # same fields as in JSON; see ABOUT
    return document


def _number(text: str) -> float:
    return int(float(text)) if float(text).is_integer() else float(text)


def _is_fastapis_own(response: Mapping[str, Any]) -> bool:
    return "HTTPValidationError" in str(response)


def sized(document: Mapping[str, Any], spec: ServiceSpec) -> dict[str, Any]:
    """Return a copy that is narrowed to the sizes, step limit and modes of this model."""
    fitted: dict[str, Any] = deepcopy(dict(document))
    sizes = dict.fromkeys(("observation", "goal"), spec.sizes.states)
    sizes["action"] = spec.sizes.actions
    for schema in fitted["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if name == "waypoints":
                _fix_size(field["items"], spec.sizes.states)
                field["maxItems"] = spec.max_episode_steps + 1
            for choice in field.get("anyOf", [field]):
                if name in sizes and choice.get("type") == "array":
                    _fix_size(choice, sizes[name])
                if name == "step_limit" and choice.get("type") == "integer":
                    choice["maximum"] = spec.max_episode_steps
                if name == "mode" and "enum" in choice:
                    choice["enum"] = [mode for mode in choice["enum"] if mode in spec.modes]
    return fitted


def _fix_size(array: dict[str, Any], size: int) -> None:
    array["minItems"] = array["maxItems"] = size
