"""A lock-step run: the updates that it owes, its episodes, and the same end after any kill."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.core.seeding import lock_step_episode
from m3pc.model import checkpoint
from m3pc.online import local
from m3pc.online.local import run_local
from m3pc.online.run_folder import open_run
from m3pc.online.trainer import Trainer
from m3pc.telemetry.catalogue import COLLECTED_SHARE
from m3pc.telemetry.recorder import value
from m3pc.tracking import run_log
from m3pc.types import InputError
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.runs.small_online import append_episodes, new_run, outcome, pretrained
from tests.support.runs.small_run import ignore


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """These tests do not look at pictures, which take longer than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "save_pictures", lambda run: None)
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    path = tmp_path_factory.mktemp("online") / "run"
    new_run(path)
    run_local(path, ignore)
    return path


def test_a_run_collects_its_steps_and_does_the_updates_that_they_owe(straight: Path) -> None:
    saved = checkpoint.read(straight)
    store = Store(straight / "replay")
    steps = int(store.lengths.sum())
    assert 400 <= steps < 400 + 2 * 30
    assert saved.progress["steps"] == steps
    assert saved.progress["episodes"] == len(store.lengths)
    assert saved.progress["updates"] == saved.weights.version == int(steps * 0.1)


def test_versions_of_the_episodes_advance(straight: Path) -> None:
    versions = [row["version"] for row in run_log.read_metrics(straight, "collected")]
    assert versions == sorted(versions)
    assert versions[0] == 0
    assert len(set(versions)) > 3


def test_evaluations_come_by_steps_with_one_before_anything_is_collected(straight: Path) -> None:
    rows = run_log.read_metrics(straight, "evaluation")
    assert rows[0]["step"] == rows[0]["updates"] == 0
    assert [row["step"] // 200 for row in rows] == [0, 1, 2]


def test_model_and_critic_change(straight: Path) -> None:
    before, after = pretrained()[0].weights, checkpoint.read(straight).weights
    changed = {
        name.split(".")[0]
        for name, tensor in after.tensors.items()
        if not tensor.equal(before.tensors[name])
    }
    assert {"model", "critic"} <= changed
    assert "normaliser" not in changed and "return_range" not in changed


class KilledError(Exception):
    pass


def killed_at(count: int, patch: pytest.MonkeyPatch) -> None:
    """Raise at the count-th append, update or save: after it if `count` is odd, else before it."""
    made = 0

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal made
            made += 1
            if made == count:
                if count % 2:
                    real(*arguments, **named)
                raise KilledError
            return real(*arguments, **named)

        patch.setattr(owner, name, call)

    for owner, name in ((Writer, "append"), (Trainer, "update"), (Trainer, "save")):
        watch(owner, name)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 12, 17, 20, 26, 31, 40, 47, 53, 60])
def test_a_run_that_is_killed_anywhere_ends_the_same(
    count: int, straight: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(_begun(tmp_path), path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        killed_at(count, patch)
        run_local(path, ignore)
    run_local(path, ignore)
    assert outcome(path) == outcome(straight)


def _begun(tmp_path: Path) -> Path:
    path = tmp_path / "begun"
    new_run(path)
    return path


def test_a_run_continues_from_an_older_checkpoint_if_newer_ones_are_damaged(
    straight: Path, tmp_path: Path
) -> None:
    """The store is rounds ahead of that checkpoint; no episode is learned from too early."""
    path = tmp_path / "run"
    shutil.copytree(straight, path)
    names = sorted(p.name for p in (path / "checkpoints").iterdir() if p.is_dir())
    for name in names[1:]:
        (path / "checkpoints" / name / "metadata.json").write_text("{}")
    run_local(path, ignore)
    assert outcome(path) == outcome(straight)


def test_a_finished_run_does_nothing_more(straight: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(straight, path)
    reports: list[Mapping[str, Any]] = []
    run_local(path, reports.append)
    assert reports == []
    assert outcome(path) == outcome(straight)


def test_a_run_that_is_being_worked_on_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run"
    new_run(path)
    refused = 0

    def meanwhile(numbers: Mapping[str, Any]) -> None:
        nonlocal refused
        if not refused:
            with pytest.raises(InputError, match="being worked on by another process"):
                run_local(path, ignore)
        refused += 1

    run_local(path, meanwhile)
    assert refused


def test_no_collected_episode_has_the_seeds_of_another() -> None:
    starts = [lock_step_episode(seed, number) for seed in range(3) for number in range(100)]
    assert len({reset for reset, _ in starts}) == len({plan for _, plan in starts}) == 300


def test_the_share_of_collected_episodes_is_reported(straight: Path, tmp_path: Path) -> None:
    """Of the ten episodes that the model learns from."""
    run = new_run(tmp_path / "fresh")
    Writer(run.replay, run.header).close()
    assert value(Trainer(run).recorder.snapshot(), COLLECTED_SHARE) == 0
    assert value(Trainer(open_run(straight)).recorder.snapshot(), COLLECTED_SHARE) == 1


def test_the_envelope_follows_the_collected_episodes(straight: Path) -> None:
    """All ten episodes of the buffer are collected ones by then, so no logged return is in it."""
    run = new_run(straight.parent / "fresh")
    Writer(run.replay, run.header).close()
    before = Trainer(run).weights().envelope
    np.testing.assert_array_equal(before, pretrained()[0].weights.envelope)
    store, after = Store(straight / "replay"), checkpoint.read(straight).weights.envelope
    best = max(
        float(segment.rewards.max()) for segment in store.segments
    )  # an average return cannot exceed the best reward
    assert after.max() <= best
    assert not np.array_equal(after, before)


def test_a_run_with_episodes_of_rollout_actors_is_refused_and_unchanged(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    append_episodes(run, 3, incarnation=1)
    with run_log.RunLog(run.path, done=0, unit="step") as log:
        log.write("evaluation", 40, {"return": 1.0})
    with pytest.raises(InputError, match=r"has episodes of a fleet.*without --local"):
        run_local(run.path, ignore)
    assert len(run_log.read_metrics(run.path, "evaluation")) == 1
    assert len(Store(run.replay).keys) == 3
