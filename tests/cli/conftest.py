"""Fixtures of the tests of commands."""

from pathlib import Path

import pytest

from tests.support.runs.commands import Command, Done


@pytest.fixture
def goal(tmp_path: Path, m3pc: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """m3pc goal, or m3pc goal-compare where the first argument is a result; see goal_runs."""
    from tests.support.runs.goal_runs import prepare

    prepare(tmp_path, monkeypatch)

    def command(*arguments: str | Path) -> Done:
        name = "goal-compare" if str(arguments[0]).endswith(".json") else "goal"
        return m3pc(name, *arguments)

    return command
