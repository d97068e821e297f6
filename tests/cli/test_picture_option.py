"""--png: a path that cannot hold a picture is refused before anything is read or made."""

from pathlib import Path

import pytest

from tests.support.runs.commands import Command, assert_one_sentence

LIFT = "robosuite/Lift"
COMMANDS = {
    "goal-compare": ["goal-compare", "nowhere.json"],
    "data make": ["data", "make", "d4rl/Hopper-v2", "--quality", "medium", "--max-steps", "1"],
    "data make by script": ["data", "make", LIFT, "--quality", "good", "--episodes", "1"],
    "data info": ["data", "info", "nowhere"],
    "explored": ["explored", "nowhere"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("png", "words"),
    [
        ("x.xyz", "--png is x.xyz; give a file whose name ends in .png or .pdf or .svg"),
        ("x", "--png is x; give a file whose name ends in .png"),
        ("folder.png", "--png is folder.png, a folder; give a file"),
    ],
)
def test_a_path_that_is_not_a_picture_is_refused_before_any_work(
    name: str, png: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m3pc: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert_one_sentence(m3pc(*COMMANDS[name], "--png", png), words)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
