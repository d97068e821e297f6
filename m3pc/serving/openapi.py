"""The server as an OpenAPI document, in which sizes and modes are those of its model."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from m3pc import __version__
from m3pc.serving.codec import JSON, MSGPACK
from m3pc.serving.messages import Message, Problem, SessionCreated
from m3pc.serving.problems import KIND
from m3pc.serving.routes import WHY, Path
from m3pc.serving.service_spec import ServiceSpec

BRACES: Final = str.maketrans("", "", "{}")
ID: Final = "v1_sessions_session"  # in the ids of what is done with a session
REF: Final = "#/components/schemas/{model}"
ABOUT: Final = f"""\
Actions for robots, planned with a trajectory model. Open a session for an episode, send where the
robot is at each step, get what to do, tell how it ended.

Messages are {JSON}, or {MSGPACK} with the same fields, in which states and actions are binary
strings of little-endian float32; an answer comes as its question did. Whatever goes wrong is told
as {KIND}."""


def document(paths: Sequence[Path], house: ServiceSpec) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        found.setdefault(path.path, {})[path.method.lower()] = _operation(path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "m3pc serve", "version": __version__, "description": ABOUT},
        "paths": found,
        "components": {
            "schemas": _schemas(paths, house),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": path.summary,
        "operationId": f"{path.method.lower()}{path.path.replace('/', '_').translate(BRACES)}",
        "responses": {str(path.status): _answer(path)}
        | {str(status): _problem(status) for status in sorted(path.problems)},
    }
    if path.path == "/readyz":
        found["responses"]["503"] = {"description": WHY[503], "content": _text()}
    if path.guarded:
        found["security"] = [{"token": []}]
    if "{session}" in path.path:
        schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
        found["parameters"] = [
            {"name": "session", "in": "path", "required": True, "schema": schema}
        ]
    if path.body is not None:
        found["requestBody"] = {"required": True, "content": _kinds(_body(path.body))}
    return found


def _answer(path: Path) -> dict[str, Any]:
    if path.answer is not None:
        schema = {"$ref": REF.format(model=path.answer.__name__)}
        content = {JSON: {"schema": schema}} if path.body is None else _kinds(schema)
        found: dict[str, Any] = {"description": "Done.", "content": content}
        return found | ({"links": _links()} if path.answer is SessionCreated else {})
    return {"description": "Done."} | ({} if path.status == 204 else {"content": _text()})


def _links() -> dict[str, Any]:
    """What may be asked with the id of a session."""
    names = {"act": f"post_{ID}_act", "end": f"post_{ID}_end"}
    names |= {"look": f"get_{ID}", "leave": f"delete_{ID}"}
    session = {"session": "$response.body#/session"}
    return {name: {"operationId": id, "parameters": session} for name, id in names.items()}


def _problem(status: int) -> dict[str, Any]:
    schema = {"$ref": REF.format(model=Problem.__name__)}
    found: dict[str, Any] = {"description": WHY[status], "content": {KIND: {"schema": schema}}}
    if status == 503:
        found["headers"] = {"Retry-After": {"schema": {"type": "string"}}}
    if status == 401:
        found["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return found


def _text() -> dict[str, Any]:
    return {"text/plain": {"schema": {"type": "string"}}}


def _kinds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The words are the same; what is a binary string in msgpack is told above."""
    return {JSON: {"schema": schema}, MSGPACK: {}}


def _body(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """A reference to the message, or to one of several."""
    schema = adapter.json_schema(ref_template=REF)
    if "oneOf" in schema:
        return {"oneOf": schema["oneOf"]}
    return {"$ref": REF.format(model=schema["title"])}


def _schemas(paths: Sequence[Path], house: ServiceSpec) -> dict[str, Any]:
    answers: list[type[Message]] = [path.answer for path in paths if path.answer is not None]
    answers.append(Problem)
    _, found = models_json_schema([(each, "serialization") for each in answers], ref_template=REF)
    schemas: dict[str, Any] = dict(found["$defs"])
    for path in paths:
        if path.body is not None:
            schema = path.body.json_schema(ref_template=REF)
            schemas |= schema.pop("$defs", {})
            if "title" in schema:
                schemas[schema["title"]] = schema
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            _fit(name, field, house)
    return schemas


def _fit(name: str, field: dict[str, Any], house: ServiceSpec) -> None:
    """What the model allows is less than what a message of any model may hold."""
    if name in ("observation", "goal", "action"):
        for choice in field.get("anyOf", [field]):
            if choice.get("type") == "array":
                _sized(choice, house.sizes.actions if name == "action" else house.sizes.states)
    if name == "waypoints":
        _sized(field["items"], house.sizes.states)
        field["maxItems"] = house.step_limit + 1
    for choice in field.get("anyOf", [field]):
        if name == "step_limit" and choice.get("type") == "integer":
            choice["maximum"] = house.step_limit
        if name == "mode" and "enum" in choice:
            choice["enum"] = [mode for mode in choice["enum"] if mode in house.modes]


def _sized(array: dict[str, Any], size: int) -> None:
    array["minItems"] = array["maxItems"] = size


def resolved(schemas: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference leads to; anything else as it is."""
    if "$ref" not in schema:
        return schema
    found: Mapping[str, Any] = schemas[schema["$ref"].rpartition("/")[2]]
    return found
