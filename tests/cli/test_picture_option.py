"""--png: a name that no picture can have is refused before anything is read or made."""

from pathlib import Path

import pytest

from tests.support.runs.commands import assert_one_sentence, invoke

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
def test_what_is_no_picture_is_refused_before_any_work(
    name: str,
    png: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert_one_sentence(invoke(capsys, monkeypatch, *COMMANDS[name], "--png", png), words)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
