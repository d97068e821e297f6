"""A run that is killed at any moment and resumed ends with the same bits."""

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

from m3pc.model import checkpoint
from m3pc.model.checkpoint import LATEST, TRAINING, WEIGHTS
from m3pc.tracking import run_log
from m3pc.training.pretrain import create_run, resume
from m3pc.types import InputError
from replay.store.store import Store
from tests.support.episodes.shared_data import ROOT
from tests.support.models.small_checkpoint import put, with_content, with_metadata, with_tensors
from tests.support.runs.refusals import sentence
from tests.support.runs.small_run import (
    FEW_UPDATES,
    MODEL,
    TOTAL,
    WatchedRun,
    config,
    ignore,
    outcome,
    set_options,
    watch_updates,
    write_data,
)


def copied(straight: WatchedRun, tmp_path: Path, *, back_to: int = TOTAL) -> Path:
    """A copy of the finished run, with its checkpoints after update `back_to` removed."""
    run = tmp_path / "run"
    shutil.copytree(straight.done.path, run)
    for number in range(back_to + 10, TOTAL + 1, 10):
        shutil.rmtree(run / "checkpoints" / f"{number:09d}")
    (run / "checkpoints" / LATEST).write_text(f"{back_to:09d}\n")
    return run


@pytest.mark.usefixtures("quick")
def test_a_finished_run_is_measured_and_nothing_else(straight: WatchedRun, tmp_path: Path) -> None:
    run = copied(straight, tmp_path)
    reports: list[Mapping[str, Any]] = []
    done = resume(run, reports.append)
    assert reports == []
    assert done.measures == straight.done.measures
    assert done.weights.digest == straight.done.weights.digest
    assert outcome(run) == straight.outcome


def test_other_data_are_refused(straight: WatchedRun, tmp_path: Path) -> None:
    run = copied(straight, tmp_path, back_to=50)
    before = outcome(run)
    other = Store(write_data(tmp_path / "other", seed=1))
    with pytest.raises(InputError) as refused:
        resume(run, ignore, data=other)
    assert other.checksum[:16] in sentence(refused)
    assert outcome(run) == before


@pytest.mark.usefixtures("quick")
def test_data_that_moved_are_read_from_their_new_path(data: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(data.path, tmp_path / "first")
    create_run(Store(tmp_path / "first"), config(**FEW_UPDATES), run)
    (tmp_path / "first").rename(tmp_path / "second")
    with pytest.raises(InputError, match="first is not a store"):
        resume(run, ignore)
    resume(run, ignore, data=Store(tmp_path / "second"))
    saved = checkpoint.read(run)
    assert (saved.path.name, saved.progress["data"]) == ("000000006", str(tmp_path / "second"))
    resume(run, ignore)  # knows the new place


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_being_worked_on_is_left_alone(straight: WatchedRun, tmp_path: Path) -> None:
    run = copied(straight, tmp_path, back_to=50)
    refusals = 0

    def meanwhile(numbers: Mapping[str, Any]) -> None:
        nonlocal refusals
        with pytest.raises(InputError, match="being worked on by another process"):
            resume(run, ignore)
        refusals += 1

    resume(run, meanwhile)
    assert refusals == 6
    assert outcome(run) == straight.outcome


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (("nowhere", "is not a run"), ("file", "is not a run"), (".", "no check")):
        with pytest.raises(InputError) as refused:
            resume(tmp_path / name, ignore)
        assert words in sentence(refused)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class StoppedError(Exception):
    pass


def resume_for(updates: int, run: Path) -> bool:
    """Resume and stop after that many updates; whether any were left."""
    made = 0

    def count(word: str, batch: object) -> None:
        nonlocal made
        if made == updates:
            raise StoppedError
        made += 1

    with pytest.MonkeyPatch.context() as patch:
        watch_updates(patch, count)
        try:
            resume(run, ignore)
        except StoppedError:
            return True
    return False


@pytest.mark.usefixtures("quick")
def test_a_run_resumes_though_no_mask_ever_shows_some_modalities(
    data: Store, tmp_path: Path
) -> None:
    """The embeddings of rewards and returns are never used and so have no moments."""
    mixture = {f"masks__mixture__{name}": 0.0 for name in ("random", "policy", "dynamics")}
    mixture |= {"masks__mixture__path": 1.0, "masks__mixture__inverse": 1.0}
    digests = []
    for stops in ((), (15,)):
        run = tmp_path / f"{len(stops)}"
        create_run(data, config(**mixture), run)
        assert [resume_for(updates, run) for updates in stops] == [True for _ in stops]
        digests.append(resume(run, ignore).weights.digest)
    assert digests[0] == digests[1]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("updates", [40, 63])
def test_a_run_that_is_stopped_anywhere_ends_the_same(
    updates: int, data: Store, straight: WatchedRun, tmp_path: Path
) -> None:
    """Model, critic, targets, optimisers, alpha and metrics: every byte of them."""
    run = tmp_path / "run"
    create_run(data, config(), run)
    assert resume_for(updates, run)
    assert checkpoint.read_newest(run / "checkpoints").path.name == f"{updates // 10 * 10:09d}"
    done = resume(run, ignore)
    assert outcome(run) == straight.outcome
    assert done.measures == straight.done.measures


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_stopped_every_few_updates_ends_the_same(
    data: Store, straight: WatchedRun, tmp_path: Path
) -> None:
    """Thirteen updates at a time, the last three of which are lost."""
    run = tmp_path / "run"
    create_run(data, config(), run)
    stops = 0
    while resume_for(13, run):
        stops += 1
        assert stops < 7
    assert stops == 6
    assert outcome(run) == straight.outcome


@pytest.mark.usefixtures("quick")
def test_after_a_damaged_checkpoint_a_run_continues_from_the_one_before(
    straight: WatchedRun, tmp_path: Path
) -> None:
    run = copied(straight, tmp_path)
    for number in (60, 70):
        os.truncate(run / "checkpoints" / f"{number:09d}" / WEIGHTS, 1000)
    resume(run, ignore)
    assert outcome(run) == straight.outcome


@pytest.mark.usefixtures("quick")
def test_reports_after_the_checkpoint_are_deleted(
    data: Store, straight: WatchedRun, tmp_path: Path
) -> None:
    """In the metrics, whose last line may be incomplete, and in TensorBoard."""
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
        event_accumulator,
    )

    run = tmp_path / "run"
    create_run(data, config(), run)
    assert resume_for(38, run)
    with (run / run_log.NAME).open("a") as file:
        file.write('{"update": 38, "gro')
    resume(run, ignore)
    assert outcome(run) == straight.outcome
    board = event_accumulator.EventAccumulator(str(run))
    board.Reload()
    scalars = [(event.step, event.value) for event in board.Scalars("model/states")]
    lines = run_log.read_metrics(run, "model")
    assert [step for step, _ in scalars] == [line["update"] for line in lines]
    assert [value for _, value in scalars] == pytest.approx([line["states"] for line in lines])


@pytest.mark.usefixtures("quick")
def test_metrics_that_a_power_cut_damaged_are_repaired(
    straight: WatchedRun, tmp_path: Path
) -> None:
    """Lines after the last checkpoint were not synced: the disk may return zeros for them."""
    run = copied(straight, tmp_path, back_to=60)
    path = run / run_log.NAME
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if json.loads(line)["update"] > 60)
    lines[place] = bytes(len(lines[place]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    resume(run, ignore)
    assert outcome(run) == straight.outcome


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "number",
    [60, 70],
)
def test_a_kill_anywhere_around_a_checkpoint_ends_the_same(
    number: int, straight: WatchedRun, tmp_path: Path
) -> None:
    """A kill leaves what is on disk after one of the durable steps of a checkpoint."""
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
        resume(run, ignore)
    assert len(taken) == (12 if number < TOTAL else 11)  # with the metrics of the next one
    for copy in taken[1::3]:
        resume(copy, ignore)
        assert outcome(copy) == straight.outcome


# Below, the hashes are made to fit, as a program with a fault or a person could.


def named(tensors: Mapping[str, Tensor], start_of_name: str) -> str:
    return next(name for name in sorted(tensors) if name.startswith(start_of_name))


def instead(name: str, tensor: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Replace the first tensor whose name starts so."""

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
    """Resuming is refused before any update."""

    def made(word: str, batch: object) -> None:
        raise AssertionError("an update was made")

    with pytest.MonkeyPatch.context() as patch:
        watch_updates(patch, made)
        with pytest.raises(InputError) as refused:
            resume(run, ignore)
    assert sentence(refused)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", SPOILT)
def test_a_state_of_training_that_does_not_fit_is_refused(
    name: str, straight: WatchedRun, tmp_path: Path
) -> None:
    run = copied(straight, tmp_path, back_to=50)
    path = run / "checkpoints" / "000000050"
    tensors = load((path / TRAINING).read_bytes())
    SPOILT[name](tensors)
    with_content(path, TRAINING, save(tensors))
    refuse_to_go_on(run)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "name",
    ["normaliser.states.mean", "normaliser.returns.std", "critic.state_mean", "envelope"],
)
def test_scales_that_differ_from_those_of_the_data_are_refused(
    name: str, straight: WatchedRun, tmp_path: Path
) -> None:
    """As of another version of the code: the model would see other numbers than before."""
    run = copied(straight, tmp_path, back_to=50)
    with_tensors(run / "checkpoints" / "000000050", lambda tensors: tensors[name].add_(1))
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
def test_impossible_counters_are_refused(name: str, straight: WatchedRun, tmp_path: Path) -> None:
    run = copied(straight, tmp_path, back_to=50)
    field, value = LIES[name]
    with_metadata(run / "checkpoints" / "000000050", put(f"progress/{field}", value))
    refuse_to_go_on(run)


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
    """Wait until the condition holds or the process has ended, at most 100 seconds."""
    end = time.monotonic() + 100
    while process.poll() is None and not condition():
        assert time.monotonic() < end, "it does not get there"
        time.sleep(0.001)


class RunWatch:
    """Reads from a run's files how far the process is that resumed it."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._before = self._stamp()

    def past(self, update: int) -> bool:
        """A line of metrics of that update or later, written since."""
        stamp = self._stamp()
        if stamp in (None, self._before):
            return False
        lines = (self._run / run_log.NAME).read_bytes().split(b"\n")[:-1]
        return bool(lines) and json.loads(lines[-1])["update"] >= update

    def writing(self, update: int) -> bool:
        """In the middle of a checkpoint of that update or later."""
        stages = (self._run / "checkpoints").glob(".*.partial")
        return self.past(0) and any(int(stage.name[1:10]) >= update for stage in stages)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = (self._run / run_log.NAME).stat()
        except FileNotFoundError:
            return None
        return stat.st_size, stat.st_mtime_ns


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_that_is_killed_again_and_again_ends_the_same(
    count: int, data: Store, tmp_path: Path
) -> None:
    """kill -9 while the run is created and `count` times later, also inside a checkpoint."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    order = [*set_options(**LONGER), "--data", data.path, "--preset", "small", "--out", run]
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
            watch = RunWatch(run)
            near = watch.writing if number % 2 else watch.past
            wait(process, lambda near=near, target=target: near(target))  # type: ignore[misc]
            if number == 0:
                process.send_signal(signal.SIGSTOP)
                with pytest.raises(InputError, match="being worked on by another process"):
                    resume(run, ignore)
            process.kill()
            kills += process.wait() == -signal.SIGKILL
            process = spawn(tmp_path, "--resume", run)
        assert process.wait(timeout=200) == 0, (tmp_path / "output").read_text()
    finally:
        process.kill()
        process.wait()
    assert kills == count
    create_run(data, config(**LONGER), straight)
    done = resume(straight, ignore)
    assert outcome(run) == outcome(straight)
    assert f"weights: {done.weights.digest[:16]}" in (tmp_path / "output").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "run", "straight"]
