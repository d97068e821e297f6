"""Checkpoints made to do harm: beside those of test_checkpoint_damage.py, ones that are too large
or name code. The finite, the right shapes and pickles are tested there."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from m3pc.cli import app
from m3pc.evaluation.jobs import EvaluationRequest, make_jobs
from m3pc.model import checkpoint
from m3pc.model.checkpoint import LATEST, TRAINING, WEIGHTS
from m3pc.types import InputError
from tests.support.models.small_checkpoint import add, put, refusal, with_metadata, write_one

HOLE = 1 << 42  # bytes: takes no room on disk, and would not fit in memory
MODULE = "module_of_an_attacker"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write_one(tmp_path / "one")


def grow(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(HOLE)


@pytest.mark.parametrize("name", [WEIGHTS, TRAINING])
def test_a_file_longer_than_recorded_is_not_read(name: str, one: Path) -> None:
    grow(one / name)
    assert f"{name} was changed" in refusal(one)


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    before, newest = add(tmp_path, 1), add(tmp_path, 2)
    grow(newest / TRAINING)
    read = checkpoint.read_newest(tmp_path)
    assert (read.path, read.passed_over) == (before, 1)


@pytest.mark.parametrize(
    "name", ["../../etc", "/etc", "..", ".", "", "000000010/..", "\0", "10\n/etc"]
)
def test_the_newest_checkpoint_is_named_by_digits_only(name: str, tmp_path: Path) -> None:
    add(tmp_path, 1)
    (tmp_path / LATEST).write_text(name)
    with pytest.raises(InputError, match="is not a checkpoint"):
        checkpoint.locate(tmp_path)


def test_only_the_beginning_of_a_long_name_is_read(tmp_path: Path) -> None:
    path = add(tmp_path, 1)
    assert checkpoint.locate(tmp_path) == path
    grow(tmp_path / LATEST)
    with pytest.raises(InputError, match="is not a checkpoint"):
        checkpoint.locate(tmp_path)


def test_no_module_that_a_checkpoint_names_is_loaded(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gymnasium imports what stands before a colon; a user who trusts it says so with --env."""
    marker = tmp_path / "marker"
    (tmp_path / f"{MODULE}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with_metadata(one, put("env", f"{MODULE}:Pendulum-v1"))
    with pytest.raises(InputError, match="whose module would be run"):
        make_jobs(EvaluationRequest(path=one, env_id=None, episodes=1, seed=0), ["q"])
    done = CliRunner().invoke(app, ["finetune", str(one), "--data", "shipped:hopper-medium-replay"])
    assert isinstance(done.exception, InputError)
    assert "whose module would be run" in str(done.exception)
    assert not marker.exists()
