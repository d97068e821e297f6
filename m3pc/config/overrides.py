"""Fields of a Config by dotted path: list them, read them, change them.

A mistake of the user becomes an `InputError` that names the field.
"""

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from m3pc.config import strict_yaml
from m3pc.config.schema import REMOVED, Config
from m3pc.config.strict_yaml import plain, shown
from m3pc.types import InputError

log = logging.getLogger(__name__)


def override(config: Config, sets: Sequence[str]) -> Config:
    """A copy with settings such as `planner.candidates=256`, checked together; values are YAML."""
    return _changed(config, [_parse_setting(text) for text in sets])


def replace(config: Config, changes: Mapping[str, object]) -> Config:
    """A copy with some fields changed, by dotted path, checked together."""
    return _changed(config, changes.items())


def flatten(config: Config) -> dict[str, object]:
    """Dotted path to value, for every field."""
    tree = config.model_dump()
    return {path: _at(tree, path) for path in settings()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldInfo:
    """What `m3pc config fields` says about one field."""

    path: str
    allowed: str  # type and range, or the list of values
    meaning: str


@cache
def settings() -> Mapping[str, FieldInfo]:
    """Every field by dotted path, in the order of the schema."""
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


_BOUNDS = {  # JSON schema's keywords, in words
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _allowed(node: Mapping[str, Any]) -> str:
    """The values that a field's JSON schema allows, in words: `a number from 0 to 1`."""
    if "enum" in node:
        return f"one of {', '.join(node['enum'])}"
    if node["type"] == "array":
        return f"a list of 1 to {node['maxItems']}, each {_allowed(node['items'])}"
    if node["type"] == "boolean":
        return "true or false"
    number = "an integer" if node["type"] == "integer" else "a number"
    if "minimum" in node and "maximum" in node:
        return f"{number} from {node['minimum']:.10g} to {node['maximum']:.10g}"
    bounds = (f"{words} {node[key]:.10g}" for key, words in _BOUNDS.items() if key in node)
    return f"{number} {' and '.join(bounds)}"


def _parse_setting(text: str) -> tuple[str, object]:
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
        raise InputError(_message(error.errors()[0], tree)) from error


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """The fields that a value sets: the one at the path, or those in a section's mapping."""
    prefix = f"{path}."
    inside = [known.removeprefix(prefix) for known in settings() if known.startswith(prefix)]
    if path in settings():
        yield path, value
    elif path in REMOVED:
        _warn_of_removed(path)
    elif not inside:
        raise InputError(_unknown(path))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        names = ", ".join(dict.fromkeys(name.partition(".")[0] for name in inside))
        raise InputError(f"{path} is {shown(value)}; give a mapping of {names}")


@cache  # one warning per process, however often it reads the settings of a run
def _warn_of_removed(path: str) -> None:
    log.warning('event=removed-setting setting=%s detail="it has no effect; remove it"', path)


def _unknown(path: str) -> str:
    leaf = path.rpartition(".")[2]
    namesakes = [known for known in settings() if known.rpartition(".")[2] == leaf]
    sections = dict.fromkeys(known.rpartition(".")[0] for known in settings())
    near = difflib.get_close_matches(path, [*settings(), *sections], cutoff=0.7)
    close = dict.fromkeys([*namesakes, *near])
    hint = f"the closest are {', '.join(list(close)[:4])}" if close else "none comes close"
    return f"{plain(path)} is not a field; {hint}; `m3pc config fields` lists all"


def _message(error: ErrorDetails, tree: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a message: the field, its value, the values allowed."""
    if not error["loc"]:
        return str(error["ctx"]["error"])  # a complete message of m3pc.config.validation
    path = ".".join(part for part in error["loc"] if isinstance(part, str))
    return f"{path} is {shown(_at(tree, path))}; give {settings()[path].allowed}"


def _at(tree: Any, path: str) -> Any:
    """The value at a dotted path of nested mappings; all of it at the empty path."""
    for name in filter(None, path.split(".")):
        tree = tree[name]
    return tree
