"""The two files with which a run is watched and steered."""

import json
import time
from pathlib import Path

import pytest

from m3pc.online.run_control import (
    STATUS_SECONDS,
    DesiredState,
    has_driver,
    is_driven,
    read_desired_state,
    read_status,
    request,
    write_status,
)
from m3pc.tracking.run_lock import locked
from m3pc.types import InputError


def test_a_new_run_has_the_default_desired_state(tmp_path: Path) -> None:
    assert read_desired_state(tmp_path) == DesiredState(actors=None, stop=False)


def test_a_request_changes_only_what_it_names(tmp_path: Path) -> None:
    request(tmp_path, actors=5)
    assert (
        request(tmp_path, stop=True)
        == read_desired_state(tmp_path)
        == DesiredState(actors=5, stop=True)
    )
    request(tmp_path, stop=False)
    assert read_desired_state(tmp_path) == DesiredState(actors=5, stop=False)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"actors": -1}', '{"more": 1}', "\xff"])
def test_a_damaged_desired_state_is_refused_with_its_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "wanted.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"wanted\.json cannot be read|actors are wanted"):
        read_desired_state(tmp_path)


def test_a_number_of_actors_ends_autoscaling_and_bounds_begin_it(tmp_path: Path) -> None:
    request(tmp_path, bounds=(2, 8))
    assert read_desired_state(tmp_path) == DesiredState(min_actors=2, max_actors=8)
    request(tmp_path, stop=True)
    assert read_desired_state(tmp_path) == DesiredState(min_actors=2, max_actors=8, stop=True)
    request(tmp_path, actors=3)
    assert read_desired_state(tmp_path) == DesiredState(actors=3, stop=True)
    request(tmp_path, bounds=(1, 1))
    assert read_desired_state(tmp_path) == DesiredState(min_actors=1, max_actors=1, stop=True)


@pytest.mark.parametrize("bounds", [(0, 2), (3, 2), (1, 10**6)])
def test_impossible_bounds_are_refused(bounds: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give two numbers from 1"):
        request(tmp_path, bounds=bounds)
    assert read_desired_state(tmp_path) == DesiredState()


def test_a_status_says_whether_a_process_works_on_the_run(tmp_path: Path) -> None:
    write_status(tmp_path, {"steps": 3})
    with locked(tmp_path):
        assert is_driven(tmp_path)
        assert read_status(tmp_path)["driven"]
    status = read_status(tmp_path)
    assert (status["steps"], status["driven"]) == (3, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["status.json"]


def test_a_lock_step_process_is_no_driver(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert not has_driver(read_status(tmp_path)), "it says nothing"
        write_status(tmp_path, {})
        assert has_driver(read_status(tmp_path))
        write_status(tmp_path, {"time": time.time() - STATUS_SECONDS - 1})
        assert not has_driver(read_status(tmp_path)), "an earlier one said it"
    write_status(tmp_path, {})
    assert not has_driver(read_status(tmp_path))


def test_a_run_without_a_status_is_not_driven(tmp_path: Path) -> None:
    assert read_status(tmp_path) == {"driven": False}


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_damaged_status_is_refused_with_its_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(InputError, match=r"status\.json cannot be read"):
        read_status(tmp_path)


def test_a_status_may_have_numbers_that_are_not_finite(tmp_path: Path) -> None:
    write_status(tmp_path, {"return": float("nan")})
    assert json.loads((tmp_path / "status.json").read_text())["return"] != 0
