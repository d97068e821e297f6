"""How a run is shown: a page on a terminal, lines elsewhere."""

import io
import math
from typing import Any

import pytest

from m3pc.cli.live import line, live, page

STATUS: dict[str, Any] = {
    "state": "collecting",
    "steps": 12_345,
    "of": 200_000,
    "steps_per_second": 151.2,
    "running": 1,
    "wanted": 2,
    "episodes": 77,
    "return": 1234.5,
    "best": 2000.0,
    "updates": 2_400,
    "owed": 2_469,
    "age": 31.4,
    "oldest": 250.0,
    "old_share": 0.02,
    "collected_share": 0.077,
    "planner": {"p50": 0.0042, "p99": 0.051, "batch": 3.7, "queue": 0},
    "entropy": -0.72,
    "target": -1.0,
    "alpha": 0.0991,
    "evaluation": [{"step": 10_000, "return": 1500.0}],
    "processes": [
        {"name": "store", "state": "up", "pid": 11, "node": "ab", "restarts": 0, "reason": ""},
        {"name": "actor-0", "state": "running", "pid": 12, "node": "ab", "restarts": 1,
         "reason": "its process ended", "steps": 6000.0},
        {"name": "actor-1", "state": "waiting", "pid": None, "node": None, "restarts": 2,
         "reason": "[red]boom"},
    ],
}  # fmt: skip


def drawn(status: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120, highlight=False)
    console.print(page(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        "12,345 of 200,000",
        "151",
        "1,234 (best 2,000)",
        "2,400 of 2,469 owed",
        "31.4 updates (max 250, 2 % old)",
        "7.7 % collected",
        "p50 4.2 ms, p99 51 ms",
        "-0.72 (bound -1), alpha 0.0991",
        "1,500 at step 10,000",
        "actor-1 waiting",
    ],
)
def test_page_and_line_show_the_numbers(words: str) -> None:
    assert words in drawn(STATUS)
    assert words in line(STATUS)


def test_every_process_has_a_row() -> None:
    rows = [row.split() for row in drawn(STATUS).splitlines()]
    assert ["actor-0", "running", "12", "ab", "6,000", "1", "its", "process", "ended"] in rows
    assert ["actor-1", "waiting", "2", "[red]boom"] in rows, "a reason is not markup"


def test_unknown_numbers_are_dashes() -> None:
    unknown = STATUS | {"return": math.nan, "best": math.nan, "entropy": math.nan, "planner": {}}
    assert "- (best -)" in line(unknown)
    assert "p50 -, p99 -" in line(unknown)


def test_a_run_without_a_driver_is_marked_as_not_running() -> None:
    assert "collecting (not running)" in line(STATUS | {"driven": False})


def test_without_a_terminal_a_line_appears_at_once_and_not_one_per_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with live("finetuning x") as show:
        for _ in range(5):
            show(STATUS)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("finetuning x: state collecting")
