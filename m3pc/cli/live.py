"""The state of an online run, as a page that is redrawn on a terminal, or as lines."""

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from m3pc.distributed.driver import ShowStatus

LINE_SECONDS = 10.0  # interval of lines if there is no terminal


@contextmanager
def live(title: str) -> "Iterator[ShowStatus]":
    """Yield a function that shows a status: a page on a terminal, else a line every ten seconds."""
    from rich.console import Console

    console = Console(stderr=True)
    with _page(console) if console.is_terminal else _lines(title) as show:
        yield show


@contextmanager
def _page(console: Any) -> "Iterator[ShowStatus]":
    from rich.live import Live

    with Live(console=console, refresh_per_second=4, transient=False) as view:
        yield lambda status: view.update(page(status))


@contextmanager
def _lines(title: str) -> "Iterator[ShowStatus]":
    last = -math.inf

    def show(status: Mapping[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            typer.echo(f"{title}: {line(status)}", err=True)
            sys.stderr.flush()

    yield show


def line(status: Mapping[str, Any]) -> str:
    """The numbers of a status in one line."""
    return "  ".join(f"{name} {text}" for name, text in _rows(status).items())


def page(status: Mapping[str, Any]) -> "RenderableType":
    """The numbers of a status, and a table of its processes."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    numbers = Table(box=None, show_header=False, padding=(0, 2))
    for name, text in _rows(status).items():
        numbers.add_row(f"[dim]{name}[/dim]", text)
    columns = ("name", "state", "pid", "node", "steps", "restarts", "reason")
    processes = Table(*columns, box=SIMPLE_HEAD)
    for process in status.get("processes", ()):
        cells = (_cell(process.get(column)) for column in columns)
        processes.add_row(*map(Text, cells))  # Text: brackets in a reason are not markup
    return Group(numbers, processes)


def _rows(status: Mapping[str, Any]) -> dict[str, str]:
    planner = status.get("planner", {})
    down = [
        f"{process['name']} {process['state']}"
        for process in status.get("processes", ())
        if process["state"] not in ("up", "running")
    ]
    rows = {
        "state": status["state"] + ("" if status.get("driven", True) else " (not running)"),
        "steps": f"{status['steps']:,} of {status['of']:,}",
        "steps/s": _number(status["steps_per_second"]),
        "actors": f"{status['running']} of {status['wanted']}",
        "episodes": f"{status['episodes']:,}",
        "return": f"{_number(status['return'])} (best {_number(status['best'])})",
        "updates": f"{status['updates']:,} of {status['owed']:,} owed",
        "policy age": f"{_number(status['age'])} updates (max {_number(status['oldest'])}, "
        f"{_number(100 * status['old_share'])} % old)",
        "replay mix": f"{_number(100 * status['collected_share'])} % collected",
        "planner": f"p50 {_ms(planner.get('p50'))}, p99 {_ms(planner.get('p99'))}, "
        f"batch {_number(planner.get('batch'))}",
        "entropy": f"{_number(status['entropy'])} (bound {_number(status['target'])}), "
        f"alpha {_number(status['alpha'])}",
    }
    if status.get("evaluation"):
        latest = status["evaluation"][-1]
        rows["evaluation"] = f"{_number(latest['return'])} at step {latest['step']:,}"
    if down:
        rows["not running"] = ", ".join(down)
    return rows


def _cell(value: object) -> str:
    """At most 40 characters: names of nodes are long, and differ at their beginning."""
    if isinstance(value, float):
        return f"{value:,.0f}"
    return "" if value is None else str(value)[:40]


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None or math.isnan(seconds) else f"{1000 * seconds:.3g} ms"
