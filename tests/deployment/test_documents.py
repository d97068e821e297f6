"""The documents speak of commands, options, targets, files, settings and metrics that exist."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from m3pc.cli import app
from m3pc.config.overrides import flatten
from m3pc.config.schema import Config
from m3pc.telemetry import catalogue
from m3pc.telemetry.recorder import Metric
from m3pc.types import AckStatus
from tests.support.episodes.episodes import header, numbered
from tests.support.episodes.live_store import closed
from tests.support.episodes.shared_data import ROOT

PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
ALL = "\n".join(PAGES.values())
FORMAT = (ROOT / "docs" / "storage-format.md").read_text(encoding="utf-8")
LINES = re.findall(r"^m3pc [^#\n]+|(?<=`)m3pc [^`\n]+(?=`)", ALL, re.MULTILINE)
# What stands after -- is a command, too.
COMMANDS = sorted({part for line in LINES for part in line.replace(" -- ", "\0m3pc ").split("\0")})


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_and_its_options_exist(line: str) -> None:
    words = line.replace("\\", " ").split()[1:]
    names = [word for word in words[:2] if re.fullmatch(r"[a-z]+(-[a-z]+)*", word)]
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    shown = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert [option for option in options if option not in shown.output] == []


def test_each_make_target_exists() -> None:
    fenced = "\n".join(re.findall(r"^```\n(.*?)^```", ALL, re.MULTILINE | re.DOTALL))
    named = set(re.findall(r"`make ([a-z-]+)`", ALL))
    named |= set(re.findall(r"^make ([a-z-]+)(?=$| +#)", fenced, re.MULTILINE))
    assert {"quickstart", "test", "docs"} <= named
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in named if f"\n{name}:" not in makefile] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_linked_file_exists(page: Path) -> None:
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    links = [x for x in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in x]
    local = [link for link in links if link.removeprefix("../") not in MADE]
    assert [link for link in local if not (page.parent / link).exists()] == []


# Pages of the site that docs/hooks.py makes.
MADE = {"CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "runbooks/index.md"}


def test_each_metric_that_a_document_names_is_declared() -> None:
    declared = {x.name for x in vars(catalogue).values() if isinstance(x, Metric)} | NO_METRICS
    named = {
        re.sub(r"_(bucket|sum|count)$", "", x) for x in re.findall(r"`(m3pc_[a-z_]+)[`{]", ALL)
    }
    assert named and named - declared == set()


# The exporter's own series, and Ray's resources for the roles of nodes.
NO_METRICS = {"m3pc_build_info", "m3pc_actor", "m3pc_planner", "m3pc_learner"}


def test_each_setting_that_a_document_sets_exists() -> None:
    known = set(flatten(Config()))
    named = set(re.findall(r"--set ([a-z_]+(?:\.[a-z_]+)+)=", ALL))
    assert named and named - known == set()


def test_an_episode_is_appended_as_the_storage_format_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", FORMAT, re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "store.append" in block)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"header": header(), "episode": numbered(0, 5)}
    exec(code, names)
    assert names["ack"].status in ("durable", "retry later")  # the second where a disk is full
    statuses = re.search(r"`ack.status` is (.*?)\.", FORMAT, re.DOTALL)
    assert statuses is not None
    assert re.findall("`([a-z ]+)`", statuses[1]) == [*AckStatus]


def test_the_former_import_paths_of_the_writer_still_work(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(
        "from replay.appender import Appender\n"
        "from replay.payload import encode\n"
        "from replay.writer import Options, Writer\n",
        names,
    )
    store = names["Appender"](names["Writer"](tmp_path / "store", header(), names["Options"]()))
    store.close()


EXAMPLES = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", FORMAT, re.MULTILINE | re.DOTALL)
    if ".steps.arrow" in block
]


@pytest.mark.parametrize("tool", ["pyarrow", "polars", "ray"])
def test_each_tool_opens_a_segment_as_the_storage_format_says(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = (block for block in EXAMPLES if re.findall(r"pyarrow|polars|ray", block)[-1] == tool)
    compile(code, "storage-format.md", "exec")
    if tool == "ray" or find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed, or would start a cluster")
    closed(tmp_path / "STORE")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["steps"]) == 11  # type: ignore[arg-type]
