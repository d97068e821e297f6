"""The command in this process: a new one would take seconds to load torch."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from m3pc.cli import main


class Done(NamedTuple):
    code: int
    out: str
    errors: str


def invoke(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path
) -> Done:
    monkeypatch.setattr(sys, "argv", ["m3pc", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as end:
        main()
    found = capsys.readouterr()
    return Done(int(end.value.code or 0), found.out, found.err)


def assert_one_sentence(done: Done, words: str) -> None:
    """What the user can mend: exit code 2, and what to do."""
    assert (done.code, done.out) == (2, "")
    assert words in done.errors
    assert "Traceback" not in done.errors
    assert len(done.errors.strip().splitlines()) == 1


def line_with(out: str, words: str) -> str:
    """The only line that has these words."""
    (line,) = (line for line in out.splitlines() if words in line)
    return line


def shows(line: str, value: float) -> bool:
    """Whether the value is among the numbers of a line, rounded as they are."""
    found = re.findall(r"-?\d+\.?\d*", line)
    return any(f"{value:.{len(text.partition('.')[2])}f}" == text for text in found)
