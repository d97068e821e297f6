"""Learners that share each batch: what one learner computes, and all of them alike."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from learner.process_group import DistributedGroup, PeersLostError, ProcessGroup
from learner.rendezvous import Rendezvous, join
from m3pc.online.learner_loop import LearnerLoop
from m3pc.online.run_folder import OnlineRun
from m3pc.online.trainer import Trainer
from m3pc.types import DivergedError, InputError
from tests.support.children.follower_child import (
    FollowerProcess,
    digest,
    everything,
    hang,
    learner,
    noise,
    poisoned,
    update,
    updates,
)
from tests.support.runs.small_online import AllowedUpdates, append_episodes, coordinator, new_run

COUNT = 6  # updates


@pytest.fixture(scope="module")
def follower() -> Iterator[FollowerProcess]:
    with FollowerProcess() as process:
        yield process


@contextmanager
def grouped(follower: FollowerProcess, task: str, **arguments: Any) -> Iterator[ProcessGroup]:
    """A group of this process, the first learner, and `follower`, which does the task."""
    group = follower.start(task, **arguments)
    try:
        yield group
    finally:
        group.leave()


def both(follower: FollowerProcess, task: Callable[..., Any], **arguments: Any) -> list[Any]:
    """What the first and the second learner answer."""
    with grouped(follower, task.__name__, **arguments) as group:
        answer = task(group, **arguments)
    return [json.loads(json.dumps(answer)), follower.answer()]


def test_two_learners_compute_what_one_computes(follower: FollowerProcess) -> None:
    """Losses within 1e-5 of themselves; weights within 1 % of how far they may have moved, which is
    the learning rate at each update."""
    alone = learner(ProcessGroup())
    expected = [update(alone, number) for number in range(COUNT)]
    with grouped(follower, "updates", count=COUNT) as group:
        shared = learner(group)
        numbers = [update(shared, number) for number in range(COUNT)]
    for one, two in zip(expected, numbers, strict=True):
        assert one.keys() == two.keys()
        np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-5, atol=1e-7)
    moved = 0.0
    first = everything(learner(ProcessGroup()))
    for name, tensor in everything(alone).items():
        if "weights" in name:
            rate = 3 * COUNT * 3e-4 if "critic" in name else COUNT * 1e-4
            moved = max(moved, (tensor - first[name]).abs().max().item() / rate)
            torch.testing.assert_close(
                everything(shared)[name], tensor, rtol=0, atol=0.01 * rate, msg=name
            )
    assert moved > 0.5
    assert follower.answer()[1] == digest(shared)


def test_learners_hold_the_same_bits_also_with_dropout(follower: FollowerProcess) -> None:
    one, two = both(follower, updates, count=COUNT, model__dropout=0.2)
    assert one == two
    assert len(one[0]) == COUNT


def test_learners_have_dropout_of_their_own_but_share_all_other_noise(
    follower: FollowerProcess,
) -> None:
    one, two = both(follower, noise)
    assert one[0] == two[0] and one[2] == two[2]
    assert one[1] != two[1]


@pytest.mark.parametrize("what", ["loss", "gradient", "critic loss", "critic gradient"])
def test_an_update_that_is_not_finite_with_one_learner_is_skipped_by_all(
    follower: FollowerProcess, what: str
) -> None:
    one, two = both(follower, poisoned, what=what)
    assert one == two
    assert what.rsplit(maxsplit=1)[-1] in one[0]
    assert one[1]  # nothing moved


class Three(DistributedGroup):
    """The first of three, without a connection."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 3


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    assert Three().shard(torch.arange(6)).tolist() == [0, 3]
    with pytest.raises(InputError, match=r"8 rows cannot be shared by 3 learners"):
        Three().shard(torch.arange(8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"online__batch": 8, "masks__groups": 2}, "online.batch is 8; give a multiple of 6"),
        (
            {"critic__batch": 8, "online__batch": 6},
            "critic.batch is 8; give a multiple of fleet.learners = 3",
        ),
        ({"compute__device": "cuda"}, "fleet.learner_gpus is 0.0; give 1"),
        ({"compute__device": "mps"}, "fleet.learners is 3; give 1"),
    ],
)
def test_settings_that_several_learners_cannot_share_are_refused_before_anything_starts(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    fits: dict[str, Any] = {
        "online__batch": 12,
        "critic__batch": 9,
        "masks__groups": 2,
        "fleet__learners": 3,
    }
    with pytest.raises(InputError, match=words):
        new_run(tmp_path / "run", **(fits | changes))
    assert not (tmp_path / "run").exists()
    new_run(tmp_path / "run", **fits)


# A whole run


def learner_loop(
    run: OnlineRun,
    permits: AllowedUpdates,
    group: ProcessGroup | None = None,
    agree_seconds: float = 5.0,
) -> LearnerLoop:
    return LearnerLoop(run, permits, coordinator(run), group=group, agree_seconds=agree_seconds)


def two_runs(path: Path, **changes: Any) -> tuple[OnlineRun, OnlineRun]:
    """Alike, with the same episodes collected."""
    runs = [new_run(path / name, fleet__learners=2, **changes) for name in ("one", "two")]
    for run in runs:
        append_episodes(run, 3)
    return runs[0], runs[1]


def test_a_run_with_a_follower_learns_what_it_would_alone(
    follower: FollowerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes arrive while it learns, one always just after the first learner counted them; the
    follower sees each at the same update."""
    count_collected = Trainer.count_collected
    monkeypatch.setattr(Trainer, "count_collected", lambda trainer: count_collected(trainer) - 1)
    alone, shared = two_runs(tmp_path, optimiser__epsilon=1e-4, online__checkpoint_every=10)
    stop = Event()

    def collect(run: OnlineRun) -> Callable[[int], None]:
        return lambda calls: append_episodes(run, 3 + calls) if calls < 4 else stop.set()

    expected = learner_loop(alone, AllowedUpdates(4, collect(alone)))
    expected.work(stop)
    stop.clear()
    with grouped(follower, "follow", run=str(shared.path)) as group:
        loop = learner_loop(shared, AllowedUpdates(4, collect(shared)), group)
        loop.work(stop)
    bits, updates, skipped, fingerprint, error = follower.answer()
    assert (bits, fingerprint) == (digest(loop.trainer.learner), loop.trainer.fingerprint())
    assert (updates, skipped, error) == (loop.trainer.updates, 0, "")
    assert loop.trainer.updates == expected.trainer.updates == 12
    assert loop.trainer.fingerprint() == expected.trainer.fingerprint()
    for name, tensor in expected.trainer.learner.model.model.state_dict().items():
        shared_tensor = loop.trainer.learner.model.model.state_dict()[name]
        torch.testing.assert_close(shared_tensor, tensor, rtol=0, atol=0.01 * 12 * 1e-3, msg=name)
    written = sorted(path.name for path in shared.checkpoints.iterdir())
    assert written == sorted(path.name for path in alone.checkpoints.iterdir())


def test_all_learners_roll_back_and_give_up_together(
    follower: FollowerProcess, tmp_path: Path
) -> None:
    _, run = two_runs(tmp_path, online__checkpoint_every=10, online__keep=1)
    stop = Event()
    with grouped(follower, "follow", run=str(run.path), bad_from=20) as group:
        loop = learner_loop(run, AllowedUpdates(1000), group)
        with pytest.raises(DivergedError, match="again after 3 returns"):
            loop.work(stop)
    bits, updates, skipped, _, error = follower.answer()
    assert (updates, skipped) == (loop.trainer.updates, loop.trainer.skipped) == (59, 40)
    assert bits == digest(loop.trainer.learner)
    assert "again after 3 returns" in error
    assert all(tensor.isfinite().all() for tensor in everything(loop.trainer.learner).values())


def test_a_follower_that_dies_ends_the_learner_at_once(tmp_path: Path) -> None:
    _, run = two_runs(tmp_path)
    with FollowerProcess() as follower, grouped(follower, "follow", run=str(run.path)) as group:
        loop = learner_loop(
            run, AllowedUpdates(4, lambda calls: os.kill(follower.pid, signal.SIGKILL)), group
        )
        with pytest.raises(PeersLostError, match="learner 0 of 2 lost the others"):
            loop.work(Event())
    assert Trainer(run).updates == 0


def test_a_follower_that_hangs_is_waited_for_until_the_deadline_of_the_rendezvous() -> None:
    with (
        FollowerProcess() as follower,
        grouped(follower, "hang", seconds=3) as group,
        pytest.raises(PeersLostError, match="Timed out waiting 3000ms"),
    ):
        hang(group)


def test_learners_that_do_not_join_are_waited_for_until_the_deadline() -> None:
    rendezvous = Rendezvous(host="127.0.0.1", port=9, size=2, device="cpu", seconds=1)
    with pytest.raises(PeersLostError, match="2 learners did not come together within 1 seconds"):
        join(rendezvous, 1)


def test_learners_that_see_different_episodes_end(
    follower: FollowerProcess, tmp_path: Path
) -> None:
    """As on a machine that sees another folder under the same name."""
    one, two = two_runs(tmp_path)
    append_episodes(one, 5)
    with (
        pytest.raises(PeersLostError, match="did not see the same checkpoint and episodes"),
        grouped(follower, "follow", run=str(two.path)) as group,
    ):
        learner_loop(one, AllowedUpdates(4), group, agree_seconds=0.1)
