"""Strict YAML: scalars of YAML 1.2, no aliases, no tags, no duplicate keys."""

import math
import re
from collections.abc import Iterator, Mapping

import yaml

from m3pc.types import InputError

# YAML 1.2's core schema. PyYAML follows 1.1, where 1e-3 is text, `no` is false and 1:30 is 90.
_SCALARS = (
    (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9][0-9_]{0,99}"), lambda text: int(text.replace("_", ""))),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: math.nan),
)


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line."""


_Dumper.add_representer(
    tuple,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=True
    ),
)


def write(tree: Mapping[str, object]) -> str:
    """A mapping as YAML text."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def read(text: str) -> object:
    """YAML text as dict, tuple, str, int, float, bool or None."""
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            _refuse_reference(event)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if node is None else _value(node)
    except RecursionError as error:
        raise InputError("not YAML that can be read: nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "a character that YAML does not allow"
        raise InputError(f"not YAML that can be read: {plain(problem)}{where}") from error


def _refuse_reference(event: yaml.Event) -> None:
    """Aliases can expand a small text without bound, tags can name any type; we need neither."""
    if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
        raise InputError("YAML aliases and tags are not read; write the value itself")


def _value(node: yaml.Node, path: str = "") -> object:
    if isinstance(node, yaml.MappingNode):
        return dict(_items(node, path))
    if isinstance(node, yaml.SequenceNode):
        return tuple(_value(item, path) for item in node.value)
    text = str(node.value)
    if getattr(node, "style", None) is not None:  # quoted or block text
        return text
    return next((parse(text) for form, parse in _SCALARS if form.fullmatch(text)), text)


def _items(node: yaml.MappingNode, path: str) -> Iterator[tuple[str, object]]:
    seen = set()
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        here = f"{path}.{name}" if path else name
        if not isinstance(key, yaml.ScalarNode) or "." in name:
            raise InputError(
                f"{plain(here)} in line {line} is not one name; put a field under its section"
            )
        if name in seen:
            raise InputError(f"{plain(here)} is given twice, again in line {line}; give it once")
        seen.add(name)
        yield name, _value(value, here)


def shown(value: object) -> str:
    """A value as in YAML, cut short enough for a message."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str):
        return plain(repr(value))
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, tuple):
        return plain(f"[{', '.join(map(shown, value[:10]))}{', …' * (len(value) > 10)}]")
    return plain(f"{value}")


def plain(text: str) -> str:
    """Text that is safe to print: at most 80 printable characters."""
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return printable if len(printable) <= 80 else printable[:79] + "…"
