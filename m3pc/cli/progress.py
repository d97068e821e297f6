"""Progress of long work: count, rate, time left and current numbers, as a bar or as lines."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from m3pc.core.progress import OnProgress

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 10.0  # interval of lines if there is no terminal


@contextmanager
def progress(title: str, unit: str) -> Iterator[OnProgress]:
    """Yield a function that shows {unit: done, "of": total, any other name: its value}."""
    from rich.console import Console

    console = Console(stderr=True)
    with _bar(title, unit, console) if console.is_terminal else _lines(title) as report:
        yield report


@contextmanager
def _lines(title: str) -> Iterator[OnProgress]:
    last = time.monotonic()
    first: tuple[float, float] | None = None  # count and time of the first report

    def report(numbers: Mapping[str, Any]) -> None:
        nonlocal last, first
        now, done = time.monotonic(), next(iter(numbers.values()))
        first = first or (done, now)  # a resumed run does not begin at 0
        if now - last >= LINE_SECONDS:
            last = now
            rate = (done - first[0]) / max(now - first[1], 1e-9)
            left = (numbers["of"] - done) / rate if numbers.get("of") and rate > 0 else None
            eta = "" if left is None else f"  {left:,.0f} s left"
            typer.echo(f"{title}: {_words(numbers)}  {_rate(rate)}{eta}", err=True)

    yield report


@contextmanager
def _bar(title: str, unit: str, console: "Console") -> Iterator[OnProgress]:
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f} {task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[rest]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, unit=unit, rate="", rest="")

        def report(numbers: Mapping[str, Any]) -> None:
            rest = dict(numbers)
            # A download reports bytes, even where the work itself is counted in steps.
            counted = unit if unit in rest else next(iter(rest))
            done, total = rest.pop(counted), rest.pop("of", None)
            speed = bar.tasks[0].speed
            rate = _rate(speed) if speed else ""
            bar.update(
                task, completed=done, total=total, unit=counted, rate=rate, rest=_words(rest)
            )

        yield report


def _rate(speed: float) -> str:
    return f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.2g}/s"


def _words(numbers: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
