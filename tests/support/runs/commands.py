"""The m3pc command in the process of the test: a new process would take seconds to load torch.

Tests ask for the fixture `m3pc` of tests/conftest.py and call it with the words of the command:

    def test_a_store_is_summarised(m3pc: Command, store: Path) -> None:
        done = m3pc("data", "info", store)
        assert done.code == 0, done.errors

Tests of what only a new process shows (imports, signals, `python -m`) start one themselves.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from m3pc.cli import main


class Done(NamedTuple):
    """The end of a command."""

    code: int
    out: str
    errors: str


class Command(Protocol):
    """Runs m3pc with some arguments."""

    def __call__(self, *arguments: str | Path) -> Done: ...


def invoke(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path
) -> Done:
    """Run m3pc; what the fixture `m3pc` does."""
    monkeypatch.setattr(sys, "argv", ["m3pc", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as end:
        main()
    output = capsys.readouterr()
    return Done(int(end.value.code or 0), output.out, output.err)


def assert_one_sentence(done: Done, words: str) -> None:
    """The command refused bad input: exit code 2 and one sentence with these words."""
    assert (done.code, done.out) == (2, "")
    assert words in done.errors
    assert "Traceback" not in done.errors
    assert len(done.errors.strip().splitlines()) == 1


def line_with(out: str, words: str) -> str:
    """The only line of the output that has these words."""
    (line,) = (line for line in out.splitlines() if words in line)
    return line


def shows(line: str, value: float) -> bool:
    """Whether the value is among the numbers of a line, rounded as they are."""
    numbers = re.findall(r"-?\d+\.?\d*", line)
    return any(f"{value:.{len(text.partition('.')[2])}f}" == text for text in numbers)
