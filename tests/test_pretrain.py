"""Pretraining: a run killed at any moment ends as if nothing had happened, to the bit."""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from learner.iql import CriticLearner
from learner.trajectory import TrajectoryLearner
from m3pc import checkpoint, presets
from m3pc.checkpoint import LATEST, METADATA, TRAINING, WEIGHTS
from m3pc.config import Config
from m3pc.run import pretrain, runlog
from m3pc.run.dataset import prepare
from m3pc.run.pretrain import resume, start
from m3pc.types import Episode, InputError
from replay.store import Store, write_store
from tests.commands import assert_one_sentence, invoke, line_with, shows
from tests.episodes import header
from tests.refusals import sentence
from tests.shared_data import ROOT
from tests.small_weights import tiny_config
from tests.test_checkpoint import put, with_content, with_metadata

MODEL, REGRESSION, CRITIC = 40, 10, 20  # updates
TOTAL = MODEL + REGRESSION + CRITIC
REPORTS = sorted({*range(4, TOTAL + 1, 4), *range(10, TOTAL + 1, 10)})  # with each checkpoint too
SETTINGS: dict[str, Any] = {
    "model.width": 16,
    "model.heads": 2,
    "model.encoder_layers": 1,
    "model.dropout": 0.1,
    "planner.candidates": 12,
    "critic.width": 16,
    "critic.batch": 8,
    "critic.regression_updates": REGRESSION,
    "critic.updates": CRITIC,
    "pretrain.updates": MODEL,
    "pretrain.warmup": 5,
    "pretrain.batch": 8,
    "pretrain.checkpoint_every": 10,
    "pretrain.log_every": 4,
    "pretrain.measure_every": 20,
    "dataset.train_share": 0.75,
}
MEASURES = {
    *("state_1", "copy_1", "state_h", "copy_h", "reward", "return", "action"),
    *("v_mean", "q_mean", "seen_mean", "v_correlation", "q_correlation"),
}


def config(**changes: object) -> Config:
    named = {name.replace(".", "__"): value for name, value in SETTINGS.items()}
    return tiny_config(**named | changes)


def silent(numbers: Mapping[str, Any]) -> None:
    pass


def write_data(path: Path, seed: int = 0) -> Path:
    """Twelve episodes of 20 random steps, in three segments."""
    rng = np.random.default_rng(seed)
    with write_store(path, header(states=3, actions=1, horizon=30), segment_bytes=1500) as writer:
        for number in range(12):
            writer.append(
                Episode(
                    states=rng.standard_normal((21, 3)).astype(np.float32),
                    actions=rng.uniform(-1, 1, (20, 1)).astype(np.float32),
                    rewards=rng.standard_normal(20).astype(np.float32),
                    terminated=number % 2 == 0,
                    truncated=number % 2 == 1,
                )
            )
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(write_data(tmp_path_factory.mktemp("data") / "walk"))


class Watched:
    """What an uninterrupted run did and saw."""

    def __init__(self, data: Store, run: Path) -> None:
        self.updates: list[str] = []
        self.states: set[tuple[float, ...]] = set()
        self.reports: list[Mapping[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            measure_less(patch)
            each_update(patch, self._note)
            start(data, config(), run)
            self.done = resume(run, self.reports.append)
        self.outcome = outcome(run)

    def _note(self, word: str, batch: Any) -> None:
        self.updates.append(word)
        self.states.update(map(tuple, batch.states.reshape(-1, 3).tolist()))


STEPS: tuple[tuple[Any, str, str], ...] = (
    (TrajectoryLearner, "update", "model"),
    (CriticLearner, "regress", "regression"),
    (CriticLearner, "update", "critic"),
)


def each_update(patch: pytest.MonkeyPatch, before: Callable[[str, Any], None]) -> None:
    """Call `before` with the kind and the batch of every update that is about to be made."""

    def watch(owner: Any, name: str, word: str) -> None:
        real = getattr(owner, name)

        def update(*arguments: Any) -> Any:
            before(word, arguments[-1])
            return real(*arguments)

        patch.setattr(owner, name, update)

    for step in STEPS:
        watch(*step)


def measure_less(patch: pytest.MonkeyPatch) -> None:
    """In this process, to be quick; what is measured has its own tests."""
    patch.setattr(pretrain, "MEASURED_BATCHES", 2)
    patch.setattr(pretrain, "MEASURED_ROWS", 16)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_less(monkeypatch)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, data: Store) -> Watched:
    return Watched(data, tmp_path_factory.mktemp("straight") / "run")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def outcome(run: Path) -> dict[str, object]:
    """All that must not depend on when a run was stopped; the place of its data may."""
    folder = run / "checkpoints"
    last = folder / (folder / LATEST).read_text().strip()
    metadata = json.loads((last / METADATA).read_bytes())
    metadata["progress"].pop("data")
    return {
        "metadata": metadata,
        WEIGHTS: sha256(last / WEIGHTS),
        TRAINING: sha256(last / TRAINING),
        "metrics": (run / runlog.NAME).read_text(),
        "names": sorted(path.name for path in folder.iterdir()),
        "config": (run / "config.yaml").read_text(),
    }


# A run


def test_a_run_begins_with_a_checkpoint_of_nothing_learned(data: Store, tmp_path: Path) -> None:
    start(data, config(), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoints", "config.yaml"}
    found = checkpoint.read(tmp_path / "run")
    assert found.path.name == "000000000"
    assert (found.weights.version, found.weights.config) == (0, config())
    assert (found.weights.state_size, found.weights.action_size) == (3, 1)
    assert (found.weights.horizon, found.weights.env) == (30, None)
    assert found.progress == {
        "model_updates": 0,
        "critic_updates": 0,
        "data": str(data.path),
        "checksum": data.checksum,
    }
    tensors, dataset = found.weights.tensors, prepare(data, config())
    for name, array in dataset.arrays.items():
        assert tensors[f"normaliser.{name}"].tolist() == array.tolist()
    for name, array in dataset.critic_arrays.items():
        assert tensors[f"critic.{name}"].tolist() == array.tolist()
    assert tensors["envelope"].tolist() == dataset.envelope.tolist()
    assert tensors["return_range"].tolist() == dataset.return_range.tolist()
    assert found.training["model.log_alpha"].item() == pytest.approx(math.log(0.1))


def test_a_run_leaves_settings_metrics_events_and_the_newest_checkpoints(
    straight: Watched,
) -> None:
    run, done = straight.done.path, straight.done
    assert presets.load(run / "config.yaml") == config()
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["000000050", "000000060", "000000070", LATEST]  # pretrain.keep = 3
    found = checkpoint.read(run)
    assert found.path.name == "000000070"
    assert (found.progress["model_updates"], found.progress["critic_updates"]) == (40, 30)
    assert found.weights.version == MODEL
    assert found.weights.digest == done.weights.digest
    assert done.measures.keys() == MEASURES
    assert all(map(math.isfinite, done.measures.values()))


def test_metrics_are_lines_of_json_in_the_order_of_updates(straight: Watched) -> None:
    text = (straight.done.path / runlog.NAME).read_text()
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
    last = runlog.read(straight.done.path, "held_out")[-1]
    assert last == {"update": TOTAL, **straight.done.measures}


def test_the_model_comes_first_then_regression_then_the_critic(straight: Watched) -> None:
    expected = {"model": MODEL, "regression": REGRESSION, "critic": CRITIC}
    assert straight.updates == [word for word, count in expected.items() for _ in range(count)]
    assert [report["updates"] for report in straight.reports] == REPORTS
    assert {report["of"] for report in straight.reports} == {TOTAL}


def test_no_update_looks_at_a_held_out_episode(straight: Watched, data: Store) -> None:
    train = prepare(data, config()).train
    assert (train.sum(), len(train)) == (9, 12)
    states = [set(map(tuple, episode.states.tolist())) for episode in data.episodes()]
    assert [bool(straight.states & episode) for episode in states] == train.tolist()


FEW: dict[str, Any] = {
    "pretrain__updates": 4,
    "pretrain__log_every": 1,
    "pretrain__warmup": 0,
    "critic__regression_updates": 0,
    "critic__updates": 2,
}


@pytest.mark.usefixtures("quick")
def test_the_seed_alone_decides_the_weights(data: Store, tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)  # whatever was drawn in this process before
        run = tmp_path / str(number)
        start(data, config(seed=seed, **FEW), run)
        digests.append((checkpoint.read(run).weights.digest, resume(run, silent).weights.digest))
    assert digests[0] == digests[1]
    assert len({digest for pair in digests for digest in pair}) == 4


@pytest.mark.usefixtures("quick")
def test_without_held_out_episodes_nothing_is_measured(data: Store, tmp_path: Path) -> None:
    start(data, config(dataset__train_share=1.0, **FEW), tmp_path / "run")
    assert resume(tmp_path / "run", silent).measures == {}
    assert runlog.read(tmp_path / "run", "held_out") == [{"update": 4}, {"update": 6}]


# Resume


def copied(straight: Watched, tmp_path: Path, *, back_to: int = TOTAL) -> Path:
    """The finished run, or as it was with an earlier one of the checkpoints that it has."""
    run = tmp_path / "run"
    shutil.copytree(straight.done.path, run)
    for number in range(back_to + 10, TOTAL + 1, 10):
        shutil.rmtree(run / "checkpoints" / f"{number:09d}")
    (run / "checkpoints" / LATEST).write_text(f"{back_to:09d}\n")
    return run


@pytest.mark.usefixtures("quick")
def test_a_finished_run_is_measured_and_nothing_else(straight: Watched, tmp_path: Path) -> None:
    run = copied(straight, tmp_path)
    reports: list[Mapping[str, Any]] = []
    done = resume(run, reports.append)
    assert reports == []
    assert done.measures == straight.done.measures
    assert done.weights.digest == straight.done.weights.digest
    assert outcome(run) == straight.outcome


def test_other_data_are_refused(straight: Watched, tmp_path: Path) -> None:
    run = copied(straight, tmp_path, back_to=50)
    before = outcome(run)
    other = Store(write_data(tmp_path / "other", seed=1))
    with pytest.raises(InputError) as refused:
        resume(run, silent, data=other)
    assert other.checksum[:16] in sentence(refused)
    assert outcome(run) == before


@pytest.mark.usefixtures("quick")
def test_data_that_moved_are_taken_from_their_new_place(data: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(data.path, tmp_path / "first")
    start(Store(tmp_path / "first"), config(**FEW), run)
    (tmp_path / "first").rename(tmp_path / "second")
    with pytest.raises(InputError, match="first is not a store"):
        resume(run, silent)
    resume(run, silent, data=Store(tmp_path / "second"))
    found = checkpoint.read(run)
    assert (found.path.name, found.progress["data"]) == ("000000006", str(tmp_path / "second"))
    resume(run, silent)  # knows the new place


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_being_worked_on_is_left_alone(straight: Watched, tmp_path: Path) -> None:
    run = copied(straight, tmp_path, back_to=50)
    refusals = 0

    def meanwhile(numbers: Mapping[str, Any]) -> None:
        nonlocal refusals
        with pytest.raises(InputError, match="being worked on by another process"):
            resume(run, silent)
        refusals += 1

    resume(run, meanwhile)
    assert refusals == 6
    assert outcome(run) == straight.outcome


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (("nowhere", "is not a run"), ("file", "is not a run"), (".", "no check")):
        with pytest.raises(InputError) as refused:
            resume(tmp_path / name, silent)
        assert words in sentence(refused)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class StoppedError(Exception):
    pass


def resume_for(updates: int, run: Path) -> bool:
    """Resume; stop where the next update would be one too many. Whether there was one."""
    made = 0

    def count(word: str, batch: object) -> None:
        nonlocal made
        if made == updates:
            raise StoppedError
        made += 1

    with pytest.MonkeyPatch.context() as patch:
        each_update(patch, count)
        try:
            resume(run, silent)
        except StoppedError:
            return True
    return False


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("updates", [40, 63])
def test_a_run_that_is_stopped_anywhere_ends_the_same(
    updates: int, data: Store, straight: Watched, tmp_path: Path
) -> None:
    """Model, critic, targets, optimisers, alpha and metrics: every byte of them."""
    run = tmp_path / "run"
    start(data, config(), run)
    assert resume_for(updates, run)
    assert checkpoint.newest(run / "checkpoints").path.name == f"{updates // 10 * 10:09d}"
    done = resume(run, silent)
    assert outcome(run) == straight.outcome
    assert done.measures == straight.done.measures


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_stopped_every_few_updates_ends_the_same(
    data: Store, straight: Watched, tmp_path: Path
) -> None:
    """Thirteen updates at a time, of which three are lost."""
    run = tmp_path / "run"
    start(data, config(), run)
    stops = 0
    while resume_for(13, run):
        stops += 1
        assert stops < 7
    assert stops == 6
    assert outcome(run) == straight.outcome


@pytest.mark.usefixtures("quick")
def test_a_damaged_checkpoint_costs_the_way_from_the_one_before(
    straight: Watched, tmp_path: Path
) -> None:
    run = copied(straight, tmp_path)
    for number in (60, 70):
        os.truncate(run / "checkpoints" / f"{number:09d}" / WEIGHTS, 1000)
    resume(run, silent)
    assert outcome(run) == straight.outcome


@pytest.mark.usefixtures("quick")
def test_reports_after_the_checkpoint_are_forgotten(
    data: Store, straight: Watched, tmp_path: Path
) -> None:
    """In the metrics, where a line may be cut, and in TensorBoard, which shows each step once."""
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
        event_accumulator,
    )

    run = tmp_path / "run"
    start(data, config(), run)
    assert resume_for(38, run)
    with (run / runlog.NAME).open("a") as file:
        file.write('{"update": 38, "gro')
    resume(run, silent)
    assert outcome(run) == straight.outcome
    board = event_accumulator.EventAccumulator(str(run))
    board.Reload()
    found = [(event.step, event.value) for event in board.Scalars("model/states")]
    lines = runlog.read(run, "model")
    assert [step for step, _ in found] == [line["update"] for line in lines]
    assert [value for _, value in found] == pytest.approx([line["states"] for line in lines])


@pytest.mark.usefixtures("quick")
def test_metrics_that_a_power_cut_spoilt_are_mended(straight: Watched, tmp_path: Path) -> None:
    """What came after the last checkpoint was not made durable: a disk may give zeros back."""
    run = copied(straight, tmp_path, back_to=60)
    path = run / runlog.NAME
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if json.loads(line)["update"] > 60)
    lines[place] = bytes(len(lines[place]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    resume(run, silent)
    assert outcome(run) == straight.outcome


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "number",
    [60, 70],
)
def test_a_kill_anywhere_around_a_checkpoint_ends_the_same(
    number: int, straight: Watched, tmp_path: Path
) -> None:
    """What is on disk at each durable step of one checkpoint is what a kill there leaves."""
    run = copied(straight, tmp_path, back_to=50)
    taken: list[Path] = []
    real_sync, copy_tree = os.fsync, shutil.copytree

    def sync(descriptor: int) -> None:
        folder = run / "checkpoints"
        newest = max(path.name.strip(".") for path in folder.iterdir() if path.is_dir())
        if newest.startswith(f"{number:09d}"):
            taken.append(tmp_path / f"{len(taken)}")
            copy_tree(run, taken[-1])
        real_sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        resume(run, silent)
    assert len(taken) == (12 if number < TOTAL else 11)  # with the metrics of the next one
    for copy in taken[1::3]:
        resume(copy, silent)
        assert outcome(copy) == straight.outcome


# Below, the hashes are made to fit, as a program with a fault or a person could.


def named(tensors: Mapping[str, Tensor], start_of_name: str) -> str:
    return next(name for name in sorted(tensors) if name.startswith(start_of_name))


def instead(name: str, tensor: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Another tensor in the place of the first one with such a name."""

    def change(tensors: dict[str, Tensor]) -> None:
        key = named(tensors, name)
        tensors[key] = tensor(tensors[key])

    return change


# Of another shape, the fused Adam reads and writes beyond the end of its memory.
SPOILT: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "nothing": lambda tensors: tensors.clear(),
    "no alpha": lambda tensors: tensors.pop("model.log_alpha"),
    "alpha of two": instead("model.log_alpha", lambda x: x.repeat(2)),
    "alpha NaN": instead("model.log_alpha", lambda x: x * math.nan),
    "no target": lambda tensors: tensors.pop(named(tensors, "critic.target.")),
    "one number for a target": instead("critic.target.", lambda x: torch.zeros(1)),
    "no moment": lambda tensors: tensors.pop(named(tensors, "model.exp_avg.")),
    "no step": lambda tensors: tensors.pop(named(tensors, "model.step.")),
    "a long moment": instead("model.exp_avg.", lambda x: torch.zeros(64, 64)),
    "a short moment": instead("model.exp_avg_sq.", lambda x: torch.zeros(1)),
    "a moment in doubles": instead("critic.exp_avg.", lambda x: x.double()),
    "a moment in integers": instead("model.exp_avg.", lambda x: x.int()),
    "a moment NaN": instead("model.exp_avg.", lambda x: x * math.nan),
    "an unknown tensor": lambda tensors: tensors.update(backdoor=torch.ones(1)),
}


def refuse_to_go_on(run: Path) -> None:
    """Before any update, for it could do harm."""

    def made(word: str, batch: object) -> None:
        raise AssertionError("an update was made")

    with pytest.MonkeyPatch.context() as patch:
        each_update(patch, made)
        with pytest.raises(InputError) as refused:
            resume(run, silent)
    assert sentence(refused)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", SPOILT)
def test_a_state_of_training_that_does_not_fit_is_refused(
    name: str, straight: Watched, tmp_path: Path
) -> None:
    run = copied(straight, tmp_path, back_to=50)
    path = run / "checkpoints" / "000000050"
    tensors = load((path / TRAINING).read_bytes())
    SPOILT[name](tensors)
    with_content(path, TRAINING, save(tensors))
    refuse_to_go_on(run)


LIES: dict[str, tuple[str, object]] = {
    "no data": ("data", ...),
    "a number for data": ("data", 5),
    "no checksum": ("checksum", ...),
    "no updates": ("model_updates", ...),
    "words for updates": ("model_updates", "40"),
    "negative updates": ("critic_updates", -1),
    "more updates than there are": ("model_updates", MODEL + 1),
    "critic before the model is done": ("model_updates", MODEL - 1),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", LIES)
def test_counters_that_cannot_be_are_refused(name: str, straight: Watched, tmp_path: Path) -> None:
    run = copied(straight, tmp_path, back_to=50)
    field, value = LIES[name]
    with_metadata(run / "checkpoints" / "000000050", put(f"progress/{field}", value))
    refuse_to_go_on(run)


# The command


def sets(**changes: object) -> list[str | Path]:
    named = SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--set={name}={value}" for name, value in named.items()]


@pytest.mark.usefixtures("quick")
def test_the_command_says_what_was_measured(
    data: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    order = [*sets(**FEW), "--data", data.path, "--preset", "small", "--seed", "3"]
    code, out, _ = invoke(capsys, monkeypatch, "pretrain", *order)
    assert code == 0
    run = tmp_path / "runs" / "walk-small-seed3"
    found = checkpoint.read(run)
    assert found.weights.config == config(seed=3, **FEW)
    measured = runlog.read(run, "held_out")[-1]
    for words, names in (
        ("next state", ("state_1", "copy_1")),
        ("last state", ("state_h", "copy_h")),
        ("error of rewards", ("reward",)),
        ("error of returns", ("return",)),
        ("error of actions", ("action",)),
        ("V, mean", ("v_mean", "v_correlation", "seen_mean")),
        ("Q, mean", ("q_mean", "q_correlation", "seen_mean")),
    ):
        line = line_with(out, words)
        for name in names:
            assert shows(line, measured[name]), (line, name)
    assert f"run: runs/walk-small-seed3  weights: {found.weights.digest[:16]}" in out
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    # A finished run says it again.
    again = invoke(capsys, monkeypatch, "pretrain", "--resume", "runs/walk-small-seed3")
    assert (again.code, again.out) == (0, out)


@pytest.mark.usefixtures("quick")
def test_the_command_says_so_where_nothing_was_held_out(
    data: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = [*sets(dataset__train_share=1.0, **FEW), "--data", data.path, "--preset", "small"]
    done = invoke(capsys, monkeypatch, "pretrain", *order, "--out", tmp_path / "run")
    assert done.code == 0, done.errors
    assert "no episode was held out" in done.out
    assert (tmp_path / "run" / "curve.png").is_file()


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
    "out exists": (["--data", "DATA", "--out", "there"], "there exists already"),
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


# Kills

LONGER: dict[str, Any] = {
    "pretrain__updates": 60,
    "pretrain__log_every": 3,
    "critic__regression_updates": 20,
    "critic__updates": 40,
}


def spawn(folder: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "m3pc", "pretrain", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(line, cwd=folder, env=environment, stdout=output, stderr=output)


def wait(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Until the condition holds or the process has ended, for 100 s at most."""
    end = time.monotonic() + 100
    while process.poll() is None and not condition():
        assert time.monotonic() < end, "it does not get there"
        time.sleep(0.001)


class Watch:
    """Tells from the files of a run, as this process goes on with it, how far it is."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._before = self._stamp()

    def past(self, update: int) -> bool:
        """A line of metrics of that update or later, written since."""
        stamp = self._stamp()
        if stamp in (None, self._before):
            return False
        lines = (self._run / runlog.NAME).read_bytes().split(b"\n")[:-1]
        return bool(lines) and json.loads(lines[-1])["update"] >= update

    def writing(self, update: int) -> bool:
        """In the middle of a checkpoint of that update or later."""
        stages = (self._run / "checkpoints").glob(".*.partial")
        return self.past(0) and any(int(stage.name[1:10]) >= update for stage in stages)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = (self._run / runlog.NAME).stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_that_is_killed_again_and_again_ends_the_same(
    count: int, data: Store, tmp_path: Path
) -> None:
    """kill -9 while the run is made and `count` times on its way, also inside a checkpoint."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    order = [*sets(**LONGER), "--data", data.path, "--preset", "small", "--out", run]
    targets = sorted(np.random.default_rng(11).integers(1, 90, count).tolist())
    process = spawn(tmp_path, *order)
    try:
        for _ in range(3):
            wait(process, (tmp_path / ".run.partial").exists)
            process.kill()
            assert process.wait() == -signal.SIGKILL
            if not run.exists():
                break
            shutil.rmtree(run)  # it was named before the signal came
            process = spawn(tmp_path, *order)
        assert not run.exists()
        assert (tmp_path / ".run.partial").exists()
        process, kills = spawn(tmp_path, *order), 0
        for number, target in enumerate(targets):
            watch = Watch(run)
            near = watch.writing if number % 2 else watch.past
            wait(process, lambda near=near, target=target: near(target))  # type: ignore[misc]
            if number == 0:
                process.send_signal(signal.SIGSTOP)
                with pytest.raises(InputError, match="being worked on by another process"):
                    resume(run, silent)
            process.kill()
            kills += process.wait() == -signal.SIGKILL
            process = spawn(tmp_path, "--resume", run)
        assert process.wait(timeout=200) == 0, (tmp_path / "output").read_text()
    finally:
        process.kill()
        process.wait()
    assert kills == count
    start(data, config(**LONGER), straight)
    done = resume(straight, silent)
    assert outcome(run) == outcome(straight)
    assert f"weights: {done.weights.digest[:16]}" in (tmp_path / "output").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "run", "straight"]
