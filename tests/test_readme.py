"""The README speaks of commands, options, targets and files that exist."""

import re

import pytest
from typer.testing import CliRunner

from m3pc.cli import app
from tests.shared_data import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"^m3pc [^#\n]+|(?<=`)m3pc [^`\n]+(?=`)", README, re.MULTILINE)))


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_and_its_options_exist(line: str) -> None:
    words = line.split()[1:]
    names = [word for word in words[:2] if re.fullmatch(r"[a-z]+(-[a-z]+)*", word)]
    options = [word for word in words if word.startswith("--")]
    shown = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert [option for option in options if option not in shown.output] == []


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 10


def test_each_make_target_exists() -> None:
    targets = set(re.findall(r"make (quickstart|test|test-long|bench|lint)\b", README))
    assert {"quickstart", "test", "bench"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_each_linked_file_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
