"""Renders the OpenAPI document as one HTML page without scripts or external files.

FastAPI's own page loads scripts from the internet, which a robot's network may not reach.
"""

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

STYLE: Final = """\
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
h2 { margin: 1.5em 0 0; border-top: 1px solid #ccc; padding-top: .8em; font-size: 1.1em; }
pre { background: #f2f2f2; padding: .5em; overflow-x: auto; } td { padding-right: 1em; }"""


def page(document: Mapping[str, Any]) -> str:
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    about = "".join(f"<p>{escape(text)}</p>" for text in info["description"].split("\n\n"))
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    messages = "".join(
        f"<h2 id={escape(name)}><code>{escape(name)}</code></h2>"
        f"<pre>{escape(json.dumps(schema, indent=1))}</pre>"
        for name, schema in document["components"]["schemas"].items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{STYLE}</style><h1>{title}</h1>{about}"
        f'<p>For programs: <a href="/openapi.json">/openapi.json</a></p>{operations}'
        f"<h1>Messages</h1>{messages}</html>\n"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    token = "" if "security" in operation else " Without a token."
    sent = "".join(f"<p>Takes {name}" for name in _messages(operation.get("requestBody", {})))
    rows = "".join(
        f"<tr><td>{status}<td>{escape(response['description'])}<td>{', '.join(_messages(response))}"
        for status, response in operation["responses"].items()
    )
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
        f"<p>{escape(operation['description'])}{token}</p>{sent}<table>{rows}</table>"
    )


def _messages(part: Mapping[str, Any]) -> list[str]:
    """Links to the messages that a request or response may hold."""
    names = []
    for content in part.get("content", {}).values():
        schema = content.get("schema", {})
        for choice in schema.get("oneOf", schema.get("anyOf", [schema])):
            name = escape(choice.get("$ref", "").rpartition("/")[2])
            names += [f"<a href=#{name}>{name}</a>"] if name else []
    return names
