"""Users' own goals: files are read exactly, and faulty ones are refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.goals import files
from m3pc.goals.files import Goals, read_goals, read_table
from m3pc.goals.registry import TASKS
from m3pc.goals.tracking import MEASURES
from m3pc.types import InputError
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.refusals import sentence

FIRST = np.array([10, 20], np.float32)
DOCUMENT: dict[str, Any] = {
    "format": 1,
    "goals": [{"step": 2, "state": [1.0, 2.0]}, {"step": 4, "state": [3, -2]}],
}


def written(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    if isinstance(content, str):
        path.write_text(content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        np.save(path, np.asarray(content))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        read_goals(path, 2)
    message = sentence(refused)
    assert str(path) in message
    return message


def rows(goals: Goals) -> list[list[float]]:
    table: list[list[float]] = goals.waypoints(FIRST).tolist()
    return table


TEXTS = {
    "numbers": "1,2\n3,4\n",
    "names": "height,angle\n1,2\n3,4\n",
    "spaces and empty lines": "height, angle\n\n1, 2.0\n\n3e0, 4\n",
    "another system's": "\ufeffheight,angle\r\n1,2\r\n3,4\r\n",
    "another system's numbers": "\ufeff1,2\r\n3,4\r\n",
    "quotes": '"height, m","angle"\n1,"2"\n3,4\n',
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_numbers_is_a_table(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, "way.csv", TEXTS[name])
    assert read_table(path, 2).tolist() == [[1, 2], [3, 4]]
    goals = read_goals(path, 2)
    assert rows(goals) == [[1, 2], [3, 4]]
    assert (goals.steps, goals.key, goals.note) == (1, (), "2 rows of way.csv")


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int16, np.uint8])
def test_an_array_of_any_number_is_a_table(kind: type, tmp_path: Path) -> None:
    path = written(tmp_path, "way.npy", np.array([[1, 2], [3, 4]], kind))
    table = read_table(path, 2)
    assert table.tolist() == [[1, 2], [3, 4]]
    assert table.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "content"), [("a.npy", [5, 6]), ("a.npy", [[5, 6]]), ("a.csv", "5,6\n")]
)
def test_a_single_state_is_held(name: str, content: object, tmp_path: Path) -> None:
    goals = read_goals(written(tmp_path, name, content), 2)
    assert (rows(goals), goals.steps, goals.note) == ([[5, 6]], None, f"one state of {name}, held")


def test_a_documents_goals_are_held_until_their_steps(tmp_path: Path) -> None:
    goals = read_goals(written(tmp_path, "a.json", DOCUMENT | {"key": 1}), 2)
    assert rows(goals) == [[1, 2], [1, 2], [1, 2], [3, -2], [3, -2]]
    assert (goals.steps, goals.key) == (4, (1,))


def test_linear_goals_are_interpolated_from_an_episodes_first_state(tmp_path: Path) -> None:
    document = DOCUMENT | {"between": "linear", "key": [0, 1]}
    goals = read_goals(written(tmp_path, "a.json", document), 2)
    assert rows(goals) == [[10, 20], [5.5, 11], [1, 2], [2, 0], [3, -2]]
    assert (goals.steps, goals.key) == (4, (0, 1))
    assert goals.waypoints(FIRST).dtype == np.float32


BAD: dict[str, tuple[str, object, str]] = {
    "another ending": ("a.txt", "1,2\n", "is not called .npy or .csv"),
    "no rows": ("a.csv", "", "has 0 rows"),
    "names only": ("a.csv", "height,angle\n", "has 0 rows"),
    "a short line": ("a.csv", "1,2\n3\n", "has '3' in line 2; expected 2 numbers"),
    "a word": ("a.csv", "1,2\n3,four\n", "has '3,four' in line 2"),
    "semicolons": ("a.csv", "1;2\n3;4\n", "expected 2 numbers with commas"),
    "a cell without an end": (
        "a.csv",
        f"1,2\n3,{'4' * 200_000}\n",
        "field limit (131072) in line 2",
    ),
    "NaN in text": ("a.csv", "1,2\n3,nan\n", "has nan in row 1, column 1"),
    "too large": ("a.csv", "1,2\n3,1e39\n", "in row 1, column 1 (from 0), which is not a f"),
    "NaN": ("a.npy", [[1, np.nan]], "has nan in row 0, column 1"),
    "another width": ("a.npy", [[1, 2, 3]], "of shape [1, 3]; expected rows of 2 numbers"),
    "another width of one": ("a.npy", [1, 2, 3], "of shape [3]; expected rows of 2 numbers"),
    "three axes": ("a.npy", [[[1, 2]]], "of shape [1, 1, 2]; expected rows of 2 numbers"),
    "text as array": ("a.npy", "1 2\n", "is not a .npy of numbers"),
    "no JSON": ("a.json", "{", "is not a document of goals: Invalid JSON"),
    "a list": ("a.json", [1], "is not a document of goals"),
    "no format": ("a.json", {"goals": DOCUMENT["goals"]}, "format: Field required"),
    "another format": ("a.json", DOCUMENT | {"format": 2}, "format: Input should be 1"),
    "no goals": ("a.json", DOCUMENT | {"goals": []}, "goals: List should have at least 1"),
    "another field": ("a.json", DOCUMENT | {"speed": 1}, "speed: Extra inputs"),
    "another between": ("a.json", DOCUMENT | {"between": "curve"}, "'hold' or 'linear'"),
    "a key below 0": ("a.json", DOCUMENT | {"key": -1}, "key"),
    "a word as a number": (
        "a.json",
        DOCUMENT | {"goals": [{"step": 1, "state": ["1", 2]}]},
        "goals.0.state.0: Input should be a valid number",
    ),
    "NaN in a document": (
        "a.json",
        '{"format": 1, "goals": [{"step": 1, "state": [NaN, 2]}]}',
        "goals.0.state.0: Input should be a finite number",
    ),
    "too large in a document": (
        "a.json",
        DOCUMENT | {"goals": [{"step": 1, "state": [1e39, 2]}]},
        "not finite in 32 bits",
    ),
    "a longer state": (
        "a.json",
        DOCUMENT | {"goals": [{"step": 3, "state": [1, 2, 3]}]},
        "a state of 3 numbers for step 3; expected 2",
    ),
    "step 0": ("a.json", DOCUMENT | {"goals": [{"step": 0, "state": [1, 2]}]}, "goals.0.step"),
    "out of order": (
        "a.json",
        DOCUMENT | {"goals": DOCUMENT["goals"][::-1]},
        "the goals' steps are [4, 2]; give them in order",
    ),
    "twice the same step": (
        "a.json",
        DOCUMENT | {"goals": [DOCUMENT["goals"][0]] * 2},
        "the goals' steps are [2, 2]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_faulty_file_is_refused_and_the_fault_located(name: str, tmp_path: Path) -> None:
    file, content, words = BAD[name]
    assert words in refusal(written(tmp_path, file, content))


HEADERS = {
    "cut short": "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2",
    "no Python": "{'descr': ',f8', 'fortran_order': 0 0, 'shape': (1, 2), }\n  1",
    "a word": "hello",
    "no end of signs": "-" * 9_000,
    "too many rows": f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({'9' * 30}, 2)}}",
    "no number of rows": "{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2)}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_array_whose_header_is_damaged_is_refused(name: str, tmp_path: Path) -> None:
    text = HEADERS[name].encode() + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16)
    (tmp_path / "a.npy").write_bytes(content)
    assert "is not a .npy of numbers" in refusal(tmp_path / "a.npy")


def test_a_repeated_dimension_counts_once(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", DOCUMENT | {"key": [1, 0, 1]})
    assert read_goals(path, 2).key == (1, 0)


@pytest.mark.parametrize("name", ["a.npy", "a.csv", "a.json"])
def test_a_missing_file_and_a_folder_are_refused(name: str, tmp_path: Path) -> None:
    refusal(tmp_path / name)
    (tmp_path / name).mkdir()
    refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_a_file_that_is_not_text_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe1")
    assert "cannot be read as text" in refusal(tmp_path / name)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([[None, 1]], object), allow_pickle=True)
    assert "is not a .npy of numbers" in refusal(path)


def test_a_file_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "a.csv", "1,2\n" * 10)
    monkeypatch.setattr(files, "MAX_BYTES", 39)
    assert "is larger than" in refusal(path)
    monkeypatch.setattr(files, "MAX_BYTES", 40)
    monkeypatch.setattr(files, "MAX_ROWS", 9)
    assert "has 10 rows; expected 1 to 9" in refusal(path)


def test_the_documents_example_is_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "GOALS.md").read_text()
    (example,) = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    goals = read_goals(written(tmp_path, "a.json", example), 11)
    assert (goals.steps, goals.key) == (100, (1,))
    assert goals.waypoints(np.zeros(11, np.float32))[[25, 75], :2] == pytest.approx(
        np.array([[0.625, 0], [1.225, 0.05]])
    )


def test_the_documents_name_every_task_and_measure() -> None:
    text = (ROOT / "docs" / "GOALS.md").read_text()
    assert [name for name in (*TASKS, *MEASURES) if f"`{name}`" not in text] == []
