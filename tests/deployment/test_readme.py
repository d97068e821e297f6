"""The README speaks of commands, options, targets and files that exist."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from m3pc.cli import app
from m3pc.types import AckStatus
from tests.support.episodes.episodes import header, numbered
from tests.support.episodes.live_store import closed
from tests.support.episodes.shared_data import ROOT

README = (ROOT / "README.md").read_text()
LINES = re.findall(r"^m3pc [^#\n]+|(?<=`)m3pc [^`\n]+(?=`)", README, re.MULTILINE)
# What stands after -- is a command, too.
COMMANDS = sorted({part for line in LINES for part in line.replace(" -- ", "\0m3pc ").split("\0")})


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


def test_an_episode_is_appended_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "store.append" in block)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"header": header(), "episode": numbered(0, 5)}
    exec(code, names)
    assert names["ack"].status in ("durable", "retry later")  # the second where a disk is full
    statuses = re.search(r"`ack.status` is (.*?);", README, re.DOTALL)
    assert statuses is not None
    assert re.findall("`([a-z ]+)`", statuses[1]) == [*AckStatus]


EXAMPLES = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    if ".steps.arrow" in block
]


@pytest.mark.parametrize("tool", ["pyarrow", "polars", "ray"])
def test_each_tool_opens_a_segment_as_the_readme_says(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = (block for block in EXAMPLES if re.findall(r"pyarrow|polars|ray", block)[-1] == tool)
    compile(code, "README.md", "exec")
    if tool == "ray" or find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed, or would start a cluster")
    closed(tmp_path / "OUT")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["steps"]) == 11  # type: ignore[arg-type]  # a table of either package
