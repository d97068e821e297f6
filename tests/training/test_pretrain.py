"""Pretraining: what a run learns from, leaves behind and says."""

import json
import math
from pathlib import Path

import pytest
import torch

from m3pc.config import presets
from m3pc.model import checkpoint
from m3pc.model.checkpoint import LATEST
from m3pc.tracking import run_log
from m3pc.training.dataset import prepare_dataset
from m3pc.training.pretrain import create_run, resume
from replay.store.store import Store
from tests.support.runs.commands import assert_one_sentence, invoke, line_with, shows
from tests.support.runs.small_run import (
    CRITIC,
    FEW_UPDATES,
    MEASURES,
    MODEL,
    REGRESSION,
    REPORTS,
    TOTAL,
    WatchedRun,
    config,
    ignore,
    set_options,
    watch_updates,
)

# A run


def test_a_run_begins_with_a_checkpoint_of_untrained_weights(data: Store, tmp_path: Path) -> None:
    create_run(data, config(), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoints", "config.yaml"}
    saved = checkpoint.read(tmp_path / "run")
    assert saved.path.name == "000000000"
    assert (saved.weights.version, saved.weights.config) == (0, config())
    assert (saved.weights.state_size, saved.weights.action_size) == (3, 1)
    assert (saved.weights.max_episode_steps, saved.weights.env) == (30, None)
    assert saved.progress == {
        "model_updates": 0,
        "critic_updates": 0,
        "data": str(data.path),
        "checksum": data.checksum,
    }
    tensors, dataset = saved.weights.tensors, prepare_dataset(data, config())
    for name, array in dataset.arrays.items():
        assert tensors[f"normaliser.{name}"].tolist() == array.tolist()
    for name, array in dataset.critic_arrays.items():
        assert tensors[f"critic.{name}"].tolist() == array.tolist()
    assert tensors["envelope"].tolist() == dataset.envelope.tolist()
    assert tensors["return_range"].tolist() == dataset.return_range.tolist()
    assert saved.training["model.log_alpha"].item() == pytest.approx(math.log(0.1))


def test_a_run_leaves_settings_metrics_events_and_the_newest_checkpoints(
    straight: WatchedRun,
) -> None:
    run, done = straight.done.path, straight.done
    assert presets.load(run / "config.yaml") == config()
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["000000050", "000000060", "000000070", LATEST]  # pretrain.keep = 3
    saved = checkpoint.read(run)
    assert saved.path.name == "000000070"
    assert (saved.progress["model_updates"], saved.progress["critic_updates"]) == (40, 30)
    assert saved.weights.version == TOTAL
    assert saved.weights.digest == done.weights.digest
    assert done.measures.keys() == MEASURES
    assert all(map(math.isfinite, done.measures.values()))


def test_metrics_are_lines_of_json_in_the_order_of_updates(straight: WatchedRun) -> None:
    text = (straight.done.path / run_log.NAME).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["update"], line["group"]) for line in lines] == [
        (update, group)
        for update in REPORTS
        for group in ("model" if update <= MODEL else "critic", "held_out")
        if group != "held_out" or update in (20, 40, 60, 70)
    ]
    by_group = {line["group"]: set(line) - {"group", "update"} for line in lines}
    assert by_group["held_out"] == MEASURES
    assert by_group["critic"] == {"value_loss", "q_loss"}
    assert by_group["model"] >= {"states", "rewards", "returns", "entropy", "alpha", "gradient"}
    last = run_log.read_metrics(straight.done.path, "held_out")[-1]
    assert last == {"update": TOTAL, **straight.done.measures}


def test_the_model_comes_first_then_regression_then_the_critic(straight: WatchedRun) -> None:
    expected = {"model": MODEL, "regression": REGRESSION, "critic": CRITIC}
    assert straight.updates == [word for word, count in expected.items() for _ in range(count)]
    assert [report["updates"] for report in straight.reports] == REPORTS
    assert {report["of"] for report in straight.reports} == {TOTAL}


def test_no_update_sees_a_held_out_episode(straight: WatchedRun, data: Store) -> None:
    train = prepare_dataset(data, config()).train
    assert (train.sum(), len(train)) == (9, 12)
    states = [set(map(tuple, episode.states.tolist())) for episode in data.episodes()]
    assert [bool(straight.states & episode) for episode in states] == train.tolist()


@pytest.mark.usefixtures("quick")
def test_the_seed_alone_decides_the_weights(data: Store, tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)  # whatever was drawn in this process before
        run = tmp_path / str(number)
        create_run(data, config(seed=seed, **FEW_UPDATES), run)
        digests.append((checkpoint.read(run).weights.digest, resume(run, ignore).weights.digest))
    assert digests[0] == digests[1]
    assert len({digest for pair in digests for digest in pair}) == 4


@pytest.mark.usefixtures("quick")
def test_without_held_out_episodes_nothing_is_measured(data: Store, tmp_path: Path) -> None:
    create_run(data, config(dataset__train_share=1.0, **FEW_UPDATES), tmp_path / "run")
    assert resume(tmp_path / "run", ignore).measures == {}
    assert run_log.read_metrics(tmp_path / "run", "held_out") == [{"update": 4}, {"update": 6}]


# The command


@pytest.mark.usefixtures("quick")
def test_the_command_prints_the_measurements(
    data: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    order = [*set_options(**FEW_UPDATES), "--data", data.path, "--preset", "small", "--seed", "3"]
    code, out, _ = invoke(capsys, monkeypatch, "pretrain", *order)
    assert code == 0
    run = tmp_path / "runs" / "walk-small-seed3"
    saved = checkpoint.read(run)
    assert saved.weights.config == config(seed=3, **FEW_UPDATES)
    measured = run_log.read_metrics(run, "held_out")[-1]
    for words, names in (
        ("next state", ("state_1", "copy_1")),
        ("last state", ("state_h", "copy_h")),
        ("error of rewards", ("reward",)),
        ("error of returns", ("return",)),
        ("error of actions", ("action", "action_spread")),
        ("... between states", ("action_between",)),
        ("... towards a state", ("action_towards",)),
        ("V, mean", ("v_mean", "v_correlation", "seen_mean")),
        ("Q, mean", ("q_mean", "q_correlation", "seen_mean")),
    ):
        line = line_with(out, words)
        for name in names:
            assert shows(line, measured[name]), (line, name)
    assert f"run: runs/walk-small-seed3  weights: {saved.weights.digest[:16]}" in out
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    # A finished run says it again.
    again = invoke(capsys, monkeypatch, "pretrain", "--resume", "runs/walk-small-seed3")
    assert (again.code, again.out) == (0, out)


@pytest.mark.usefixtures("quick")
def test_the_command_says_that_no_episode_was_held_out(
    data: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = [
        *set_options(dataset__train_share=1.0, **FEW_UPDATES),
        "--data",
        data.path,
        "--preset",
        "small",
    ]
    done = invoke(capsys, monkeypatch, "pretrain", *order, "--out", tmp_path / "run")
    assert done.code == 0, done.errors
    assert "no episode was held out" in done.out
    assert (tmp_path / "run" / "curve.png").is_file()


@pytest.mark.usefixtures("quick")
def test_training_that_diverges_ends_with_its_own_code(
    data: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch_updates(monkeypatch, lambda word, batch: batch.states.fill(math.nan))
    order = [*set_options(**FEW_UPDATES), "--data", data.path]
    done = invoke(capsys, monkeypatch, "pretrain", *order, "--out", tmp_path / "run")
    assert done.code == 76
    assert "update 0 is nan: training diverged; start again with a lower" in done.errors
    assert "Traceback" not in done.errors


BAD: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "there is nothing to learn from; give --data STORE"),
    "no data": (["--preset", "small"], "there is nothing to learn from"),
    "unknown data": (["--data", "nowhere"], "nowhere is not a store"),
    "unknown set": (["--data", "shipped:ant"], "shipped:ant does not come with m3pc"),
    "unknown preset": (["--data", "DATA", "--preset", "large"], "give one of parity, paper, small"),
    "unknown field": (["--data", "DATA", "--set", "model.with=3"], "model.with is not a field"),
    "bad value": (["--data", "DATA", "--set", "model.width=0"], "model.width is 0; give"),
    "no file": (["--data", "DATA", "--file", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    "all too short": (["--data", "DATA", "--set", "dataset.min_length=21"], "has 0 episodes of 21"),
    "out exists": (
        ["--data", "DATA", "--out", "there"],
        "exists already; go on with it by",
    ),
    "out in a file": (["--data", "DATA", "--out", "there/file/x"], "cannot be made"),
    "resume and seed": (["--resume", "there", "--seed", "0"], "give --resume alone"),
    "resume and out": (["--resume", "there", "--out", "x"], "give --resume alone"),
    "resume and preset": (["--resume", "there", "--preset", "small"], "give --resume alone"),
    "resume and file": (["--resume", "there", "--file", "x.yaml"], "give --resume alone"),
    "resume and set": (["--resume", "there", "--set", "seed=1"], "give --resume alone"),
    "resume nothing": (["--resume", "nowhere"], "nowhere is not a run"),
    "resume no run": (["--resume", "there"], "has no checkpoint to go on from"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    name: str,
    data: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/file").touch()
    arguments, words = BAD[name]
    arguments = [str(data.path) if argument == "DATA" else argument for argument in arguments]
    assert_one_sentence(invoke(capsys, monkeypatch, "pretrain", *arguments), words)
    assert sorted(map(str, tmp_path.rglob("*"))) == [f"{tmp_path}/there", f"{tmp_path}/there/file"]
