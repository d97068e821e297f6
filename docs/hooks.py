"""Pages of the site that have their home outside docs/, the list of runbooks, and equations.

Equations are written as on GitHub, between dollar signs, and become MathML, which browsers show
without a script.
"""

import re
from html import unescape
from pathlib import Path
from typing import Any

ROOT_PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
ROOT = Path(__file__).resolve().parents[1]
MATH = re.compile(r"\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$")
LINK = re.compile(r"\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_inside(text, prefix="docs/")))
    files.append(File.generated(config, "runbooks/index.md", content=_runbooks()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links from docs/ to a page of the root lead to that page of the site."""
    up = "../" * (page.file.src_uri.count("/") + 1)
    for name in ROOT_PAGES:
        markdown = markdown.replace(f"]({up}{name}", f"]({up[3:]}{name}")
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    return MATH.sub(_mathml, html) if page.file.src_uri == "algorithm.md" else html


def _mathml(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    block, inline = match["block"], match["inline"]
    latex = unescape((block or inline).strip())
    mathml: str = convert(latex, display="block" if block else "inline")
    return mathml


def _inside(text: str, prefix: str) -> str:
    """A root page's links as seen from inside docs/. Files that are not on the site become links to
    its first page."""

    def link(match: re.Match[str]) -> str:
        path, anchor = match["path"], match["anchor"] or ""
        if "://" in path or path.startswith("#"):
            return match[0]
        if path.startswith(prefix) or path in ROOT_PAGES:
            return f"]({path.removeprefix(prefix)}{anchor})"
        return "](index.md)"

    return LINK.sub(link, text)


def _runbooks() -> str:
    pages = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
    rows = [f"- [{page.stem}]({page.name}): {_meaning(page)}" for page in pages]
    return "# Runbooks\n\nOne page for every alert in `monitoring/rules/`.\n\n" + "\n".join(rows)


def _meaning(page: Path) -> str:
    text = page.read_text(encoding="utf-8").partition("## What it means\n")[2]
    return " ".join(text.split("##")[0].split()).split(". ")[0].rstrip(".") + "."
