"""The command as users run it: real processes, exit codes, printed text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from m3pc.cli import app
from replay.store.store import Store, write_store
from replay.writing.writer import Writer
from tests.support.episodes.episodes import header, numbered
from tests.support.episodes.live_store import fill, left_by_kill
from tests.support.episodes.shared_data import ROOT

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "small"
    with write_store(path, header()) as writer:
        for number, length in enumerate((5, 9, 20)):
            writer.append(numbered(number, length, terminated=number == 1))
    return path


def run_module(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m m3pc` of this source tree, in any folder, as if nothing was installed."""
    return subprocess.run(
        [sys.executable, "-m", "m3pc", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_help_imports_no_heavy_package() -> None:
    code = (
        "import sys; sys.argv = ['m3pc', '--help']\n"
        "from m3pc.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'ray', 'numpy', 'pyarrow', 'gymnasium', 'mujoco', 'matplotlib',\n"
        "         'mlflow', 'wandb'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_works_from_anywhere(tmp_path: Path) -> None:
    done = run_module("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[0]) == (0, "m3pc")


def test_info_shows_numbers_and_saves_the_histogram(store: Path, tmp_path: Path) -> None:
    done = run_module("data", "info", store, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "episodes" in done.stdout
    assert "task 1, step limit 2, cut 0" in done.stdout
    assert "states[1]" in done.stdout
    assert (tmp_path / "small-returns.png").read_bytes().startswith(PNG)


def test_info_as_json_has_every_number(store: Path) -> None:
    done = CliRunner().invoke(app, ["data", "info", str(store), "--json"])
    info = json.loads(done.stdout)
    assert (info["episodes"], info["steps"]) == (3, 34)
    assert len(info["checksum"]) == 64
    assert len(info["statistics"]["states"]["mean"]) == 2


def test_the_shipped_set_is_complete() -> None:
    done = CliRunner().invoke(app, ["data", "info", "shipped:hopper-medium-replay", "--json"])
    info = json.loads(done.stdout)
    assert (info["episodes"], info["steps"]) == (409, 59_632)
    assert info["environment"] == "d4rl/Hopper-v2"
    assert info["checksum"].startswith("90c1a24327eaf9cc")


def test_sample_draws_the_same_with_the_same_seed(store: Path) -> None:
    arguments = ["data", "sample", str(store), "--length", "4", "--batch", "8", "--updates", "3"]
    first, same = (CliRunner().invoke(app, arguments).stdout for _ in range(2))
    other = CliRunner().invoke(app, [*arguments, "--seed", "1"]).stdout
    digests = [text.split("sha256 ")[1] for text in (first, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert "states [8, 4, 2]" in first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data", "info", "nowhere"], "nowhere is not a store"),
        (["data", "info", "shipped:ant"], "does not come with m3pc"),
        (["data", "import", "nowhere.hdf5", "out"], "no file or folder nowhere.hdf5"),
        (
            ["data", "regenerate", "nowhere.npz", "out", "--steps", "1"],
            "no file or folder nowhere.npz",
        ),
        (["data", "make", "Hopper-v99", "out", "--quality", "medium"], "Hopper-v99"),
        (["data", "make", "Hopper-v4", "out", "--quality", "great"], "medium-replay"),
        (
            ["data", "make", "CartPole-v1", "o", "--quality", "medium", "--target-return", "9"],
            "Box",
        ),
        (["config", "show", "--set", "planner.candidate=9"], "planner.candidates"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    done = run_module(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_make_keeps_the_replay_of_its_training(tmp_path: Path) -> None:
    arguments = ("data", "make", "Pendulum-v1", "replay", "--quality", "medium-replay")
    # Any policy returns more than -10,000: training stops at the first evaluation.
    done = run_module(*arguments, "--target-return=-10000", "--seed", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained for 1,000 steps, 5 episodes" in done.stdout
    assert (tmp_path / "replay-curve.png").read_bytes().startswith(PNG)
    info = json.loads(run_module("data", "info", "replay", "--json", cwd=tmp_path).stdout)
    assert (info["episodes"], info["steps"], info["step limit"]) == (5, 1000, 200)


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--quality", "expert", "--replay", "out"], 2, "--replay is a second place"),
        (["--quality", "expert", "--png", "file/curve.png"], 74, "file"),
        (["--quality", "expert", "--replay", "file/replay"], 2, "cannot be made"),
    ],
)
def test_make_checks_its_options_before_it_trains(
    more: list[str], code: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    command = ["data", "make", "Pendulum-v1", "out", "--target-return=-10000", *more]
    done = run_module(*command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_make_stores_rollouts_and_their_replay_apart(tmp_path: Path) -> None:
    command = ["data", "make", "Pendulum-v1", "--quality", "expert", "--steps", "300"]
    done = run_module(*command, "--target-return=-10000", "--replay", "seen", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out, seen = Store(tmp_path / "data" / "pendulum-v1-expert"), Store(tmp_path / "seen")
    assert (out.header.source["content"], out.lengths.tolist()) == ("rollouts", [200, 200])
    assert (seen.header.source["content"], seen.totals.steps) == ("replay", 1000)
    assert out.header.source["engine"].startswith("gymnasium")


def test_make_says_so_when_the_return_is_not_reached(tmp_path: Path) -> None:
    arguments = ("data", "make", "Pendulum-v1", "out", "--quality", "medium", "--max-steps", "400")
    done = run_module(*arguments, "--target-return", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "not 0.0; give more --max-steps" in done.stderr
    assert not (tmp_path / "out").exists()


def test_data_info_reads_a_store_in_use_and_one_whose_writer_was_killed(
    tmp_path: Path,
) -> None:
    with fill(tmp_path / "open"):
        done = run_module("data", "info", "open", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["episodes"] == 6
    left_by_kill(tmp_path / "dead")
    done = run_module("data", "info", "dead", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "task 1, step limit 5, cut 0" in done.stdout
    assert (tmp_path / "dead-returns.png").exists()


def test_data_info_of_a_store_without_episodes_says_so(tmp_path: Path) -> None:
    with Writer(tmp_path / "empty", header()):
        done = run_module("data", "info", "empty", cwd=tmp_path)
        info = json.loads(run_module("data", "info", "empty", "--json", cwd=tmp_path).stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert "none yet" in done.stdout
    assert (info["episodes"], info["statistics"]) == (0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]  # no picture of nothing
