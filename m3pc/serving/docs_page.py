"""The OpenAPI document as one HTML page: no scripts, nothing from elsewhere."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from m3pc.serving.openapi import resolved

STYLE: Final = """\
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
h2 { margin: 2em 0 0; border-top: 1px solid #ccc; padding-top: .8em; font-size: 1.1em; }
h2 code { background: none; } code { background: #f2f2f2; padding: 0 .2em; }
table { border-collapse: collapse; margin: .5em 0 1em; } p { margin: .5em 0; }
td, th { text-align: left; vertical-align: top; padding: .15em .8em .15em 0; font-size: .95em; }
th { font-weight: 600; } caption { text-align: left; font-weight: 600; }"""


def page(document: Mapping[str, Any]) -> str:
    info, schemas = document["info"], document["components"]["schemas"]
    body = "".join(
        part
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        for part in _operation(method, path, operation, schemas)
    )
    title = f"{escape(info['title'])} {escape(info['version'])}"
    about = "".join(f"<p>{escape(text)}</p>" for text in info["description"].split("\n\n"))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{STYLE}</style><h1>{title}</h1>{about}"
        f'<p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>{body}</html>\n'
    )


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation['summary'])}"
    yield "</p>" if "security" in operation else " Without a token.</p>"
    for content in _described(operation.get("requestBody", {})):
        for each in content["schema"].get("oneOf", [content["schema"]]):
            yield _fields("You send", resolved(schemas, each), schemas)
    for status, response in operation["responses"].items():
        if status.startswith("2"):
            for content in _described(response):
                schema = resolved(schemas, content["schema"])
                yield _fields(f"{status}, you get", schema, schemas)
    problems = [
        f"<tr><td>{status}<td>{escape(response['description'])}"
        for status, response in operation["responses"].items()
        if not status.startswith("2")
    ]
    yield f"<table><caption>Otherwise</caption>{''.join(problems)}</table>" if problems else ""


def _described(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Its kinds of content; msgpack has the fields of JSON."""
    return [content for content in message.get("content", {}).values() if "schema" in content]


def _fields(caption: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    about = schema.get("description", "")
    caption = f"{caption}: {about}" if about else caption
    needed = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(field))}"
        f"<td>{'needed' if name in needed else ''}<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table><caption>{escape(caption)}</caption>{rows}</table>"


def _kind(field: Mapping[str, Any]) -> str:
    """In words: `11 times number from -1e+06 to 1e+06`."""
    if "anyOf" in field:
        return " or ".join(_kind(each) for each in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        low, high = field.get("minItems", 0), field.get("maxItems")
        size = (
            "" if high is None else f"{high} times " if low == high else f"{low} to {high} times "
        )
        return f"{size}{_kind(field['items'])}"
    words = [str(field.get("type", ""))]
    bounds = (("from", "minimum"), ("to", "maximum"), ("below", "exclusiveMaximum"))
    words += [f"{word} {field[key]:g}" for word, key in bounds if key in field]
    return " ".join(words + ([f"like {field['pattern']}"] if "pattern" in field else []))
