"""Fields of a Config by dotted path: what there is, what is allowed, how to change one.

Whatever a user gets wrong is an `InputError` that names the field.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from m3pc.config import strict_yaml
from m3pc.config.schema import Config
from m3pc.config.strict_yaml import plain, shown
from m3pc.types import InputError


def override(config: Config, sets: Sequence[str]) -> Config:
    """Apply settings such as `planner.candidates=256` together; the value is read as YAML."""
    return _changed(config, [_setting(text) for text in sets])


def replace(config: Config, changes: Mapping[str, object]) -> Config:
    """A copy with some fields changed, each given by its dotted path, checked as a whole."""
    return _changed(config, changes.items())


def flatten(config: Config) -> dict[str, object]:
    """Dotted path to value, for every field."""
    tree = config.model_dump()
    return {path: _at(tree, path) for path in settings()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldInfo:
    """What a user may know about one field."""

    path: str
    allowed: str  # type and range, or the list of values
    meaning: str


@cache
def settings() -> Mapping[str, FieldInfo]:
    """Every field by dotted path, in the order of the models."""
    schema = Config.model_json_schema()
    return {setting.path: setting for setting in _settings_of(schema, schema["$defs"], "")}


def _settings_of(
    schema: Mapping[str, Any], sections: Mapping[str, Any], prefix: str
) -> Iterator[FieldInfo]:
    for name, node in schema["properties"].items():
        if "$ref" in node:
            section = sections[node["$ref"].rpartition("/")[2]]
            yield from _settings_of(section, sections, f"{prefix}{name}.")
        else:
            yield FieldInfo(path=prefix + name, allowed=_allowed(node), meaning=node["description"])


_BOUNDS = {  # JSON schema's words and ours
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _allowed(node: Mapping[str, Any]) -> str:
    """A field's JSON schema in words: `a number from 0 to 1`."""
    if "enum" in node:
        return f"one of {', '.join(node['enum'])}"
    if node["type"] == "array":
        return f"a list of 1 to {node['maxItems']}, each {_allowed(node['items'])}"
    if node["type"] == "boolean":
        return "true or false"
    kind = "an integer" if node["type"] == "integer" else "a number"
    if "minimum" in node and "maximum" in node:
        return f"{kind} from {node['minimum']:.10g} to {node['maximum']:.10g}"
    bounds = (f"{word} {node[key]:.10g}" for key, word in _BOUNDS.items() if key in node)
    return f"{kind} {' and '.join(bounds)}"


def _setting(text: str) -> tuple[str, object]:
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise InputError(f"{shown(text)} is not a setting; give a field and a value, a.b=c")
    try:
        return path, strict_yaml.read(value)
    except InputError as error:
        raise InputError(f"{plain(path)} is {shown(value)}: {error}") from error


def _changed(config: Config, changes: Iterable[tuple[str, object]]) -> Config:
    tree = config.model_dump()
    for path, value in changes:
        for field, leaf in _leaves(path, value):
            section, _, name = field.rpartition(".")
            _at(tree, section)[name] = leaf
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise InputError(_sentence(error.errors()[0], tree)) from error


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """The fields that a value sets: the one at the path, or those of a mapping for a section."""
    inside = [
        known.removeprefix(f"{path}.") for known in settings() if known.startswith(f"{path}.")
    ]
    if path in settings():
        yield path, value
    elif not inside:
        raise InputError(_unknown(path))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        names = ", ".join(dict.fromkeys(name.partition(".")[0] for name in inside))
        raise InputError(f"{path} is {shown(value)}; give a mapping of {names}")


def _unknown(path: str) -> str:
    leaf = path.rpartition(".")[2]
    namesakes = [known for known in settings() if known.rpartition(".")[2] == leaf]
    sections = dict.fromkeys(known.rpartition(".")[0] for known in settings())
    near = difflib.get_close_matches(path, [*settings(), *sections], cutoff=0.7)
    close = dict.fromkeys([*namesakes, *near])
    hint = f"the closest are {', '.join(list(close)[:4])}" if close else "none comes close"
    return f"{plain(path)} is not a field; {hint}; `m3pc config fields` lists all"


def _sentence(error: ErrorDetails, tree: Mapping[str, Any]) -> str:
    """One of pydantic's findings in our words: the field, what was found, what is allowed."""
    if not error["loc"]:
        return str(error["ctx"]["error"])  # a conflict between fields speaks for itself
    path = ".".join(part for part in error["loc"] if isinstance(part, str))
    return f"{path} is {shown(_at(tree, path))}; give {settings()[path].allowed}"


def _at(tree: Any, path: str) -> Any:
    """What is at a dotted path of nested mappings; all of it at the empty path."""
    for name in filter(None, path.split(".")):
        tree = tree[name]
    return tree
