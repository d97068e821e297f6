"""A trainer whose updates are not finite: they are skipped, rolled back, and end the run."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from learner.process_group import ProcessGroup
from m3pc.config.presets import PRESETS
from m3pc.model import checkpoint
from m3pc.online.trainer import Trainer
from m3pc.telemetry.catalogue import NONFINITE_UPDATES, ROLLBACKS, UPDATES_DONE
from m3pc.telemetry.recorder import Metric
from m3pc.types import DivergedError
from tests.support.children.follower_child import digest, everything, learner, update, updates
from tests.support.runs.small_online import append_episodes, new_run


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    run = new_run(tmp_path / "run")
    append_episodes(run, 3)
    return Trainer(run)


def spoil(trainer: Trainer, bad: Callable[[int], bool], *, batches: str = "windows") -> None:
    """Batches of these updates have a number that is not finite. For the critic, two batches belong
    to an update."""
    mixture = getattr(trainer, batches)
    sample, per_update = mixture.batch, 1 if batches == "windows" else 2

    def batch(number: int) -> Any:
        rows = sample(number)
        if bad(number // per_update):
            rows.rewards[0] = rows.returns[0] = math.inf  # whichever the critic learns from
        return rows

    mixture.batch = batch


def counted(trainer: Trainer, metric: Metric) -> float:
    return trainer.recorder.snapshot().get(metric.name, {}).get("", [0.0])[0]


def finite(trainer: Trainer) -> bool:
    return all(tensor.isfinite().all() for tensor in everything(trainer.learner).values())


@pytest.mark.parametrize("critic", ["iql", "regression"])
@pytest.mark.parametrize("batches", ["windows", "transitions"])
def test_an_update_that_is_not_finite_is_skipped_and_counted(
    batches: str, critic: str, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run", critic__online=critic)
    append_episodes(run, 3)
    trainer = Trainer(run)
    spoil(trainer, lambda number: number in (1, 3), batches=batches)
    numbers, bits = [], []
    for _ in range(5):
        numbers.append(trainer.update())
        bits.append([x.detach().clone() for x in trainer.learner.model.model.parameters()])
    assert [bool(row) for row in numbers] == [True, False, True, False, True]
    stayed = [all(x.equal(y) for x, y in zip(bits[k], bits[k - 1], strict=True)) for k in (1, 2, 3)]
    assert stayed == [True, False, True]
    assert (trainer.updates, trainer.skipped) == (5, 2)
    assert (counted(trainer, UPDATES_DONE), counted(trainer, NONFINITE_UPDATES)) == (5, 2)
    assert counted(trainer, ROLLBACKS) == 0
    assert finite(trainer)


def test_ten_skipped_in_a_row_roll_back_and_learning_continues_with_the_next_batches(
    trainer: Trainer,
) -> None:
    for _ in range(4):
        trainer.update()
    trainer.save()
    saved = digest(trainer.learner)
    for _ in range(3):
        trainer.update()
    assert digest(trainer.learner) != saved
    spoil(trainer, lambda number: number < 17)
    for _ in range(9):
        trainer.update()
    assert counted(trainer, ROLLBACKS) == 0
    trainer.update()
    assert counted(trainer, ROLLBACKS) == 1
    assert digest(trainer.learner) == saved
    assert trainer.updates == 17
    assert trainer.update()
    assert digest(trainer.learner) != saved


def test_after_three_rollbacks_a_run_has_diverged_and_its_checkpoints_are_finite(
    trainer: Trainer,
) -> None:
    trainer.update()
    trainer.save()
    spoil(trainer, lambda number: True)
    with pytest.raises(DivergedError, match="again after 3 returns"):
        for _ in range(100):
            trainer.update()
            trainer.save()
    assert (trainer.updates, counted(trainer, NONFINITE_UPDATES), counted(trainer, ROLLBACKS)) == (
        40,
        40,
        3,
    )
    for folder in trainer.run.checkpoints.glob("0*"):
        saved = checkpoint.read(folder)
        tensors = (*saved.weights.tensors.values(), *saved.training.values())
        assert all(tensor.isfinite().all() for tensor in tensors)


def test_the_counts_survive_a_checkpoint(trainer: Trainer) -> None:
    spoil(trainer, lambda number: number < 19)
    for _ in range(10):
        trainer.update()
    for _ in range(8):
        trainer.update()
    trainer.save()
    again = Trainer(trainer.run)
    assert (again.updates, again.skipped) == (18, 18)
    spoil(again, lambda number: number < 20)
    again.update()
    assert counted(again, ROLLBACKS) == 0
    again.update()  # the tenth in a row, eight of them before
    assert counted(again, ROLLBACKS) == 1
    again.save()
    progress = checkpoint.read_newest(trainer.run.checkpoints).progress
    assert (progress["left_out"], progress["rollbacks"], progress["bad"]) == (20, 2, [])


# What is learnt online


@pytest.mark.parametrize("preset", PRESETS)
def test_rewards_and_returns_are_learned_online_except_by_parity(preset: str) -> None:
    """The last layers of rewards and returns change only if the loss has their terms."""
    online = learner(ProcessGroup(), preset=preset)
    before = {name: x.clone() for name, x in online.model.model.state_dict().items()}
    update(online, 0)
    after = online.model.model.state_dict()
    moved = {
        part
        for part in ("states", "rewards", "returns", "actions")
        if any(
            f"heads.{part}." in name and name.endswith("bias") and not x.equal(before[name])
            for name, x in after.items()
        )
    }
    both = {"states", "actions"}
    assert moved == (both if preset == "parity" else both | {"rewards", "returns"})


@pytest.mark.parametrize("preset", PRESETS)
def test_errors_of_visible_actions_are_learned_online_except_by_parity(preset: str) -> None:
    with_it, without = (
        updates(ProcessGroup(), 3, preset=preset, loss__visible_action_mse=on)[1]
        for on in (True, False)
    )
    assert (with_it == without) == (preset == "parity")


def test_the_critic_learns_online_by_the_configured_method(tmp_path: Path) -> None:
    """A regression makes the targets equal to the Q functions, IQL moves them slowly."""
    for way, at_once in (("iql", False), ("regression", True)):
        run = new_run(tmp_path / way, critic__online=way)
        append_episodes(run, 3)
        trainer = Trainer(run)
        trainer.update()
        critic = trainer.learner.critic
        twins = [x.detach() for x in critic.critic.q.parameters()]
        same = [x.equal(y) for x, y in zip(twins, critic.targets, strict=True)]
        assert all(same) == at_once
