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
from tests.support.children.mate_child import (
    Other,
    digest,
    everything,
    hang,
    learner,
    noise,
    poisoned,
    update,
    updates,
)
from tests.support.runs.small_online import Permits, appended, coordinator, new_run

COUNT = 6  # updates


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    with Other() as found:
        yield found


@contextmanager
def grouped(other: Other, task: str, **arguments: Any) -> Iterator[ProcessGroup]:
    """This process as the first of two learners."""
    group = other.told(task, **arguments)
    try:
        yield group
    finally:
        group.leave()


def both(other: Other, task: Callable[..., Any], **arguments: Any) -> list[Any]:
    """What the first and the second learner answer."""
    with grouped(other, task.__name__, **arguments) as group:
        found = task(group, **arguments)
    return [json.loads(json.dumps(found)), other.answer()]


def test_two_learners_compute_what_one_does(other: Other) -> None:
    """Losses to 1e-5 of themselves; weights to 1 % of the way that they may have gone, which is the
    learning rate in each update."""
    alone = learner(ProcessGroup())
    expected = [update(alone, number) for number in range(COUNT)]
    with grouped(other, "updates", count=COUNT) as group:
        shared = learner(group)
        found = [update(shared, number) for number in range(COUNT)]
    for one, two in zip(expected, found, strict=True):
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
    assert other.answer()[1] == digest(shared)


def test_learners_hold_the_same_bits_also_where_numbers_are_dropped_at_random(other: Other) -> None:
    one, two = both(other, updates, count=COUNT, model__dropout=0.2)
    assert one == two
    assert len(one[0]) == COUNT


def test_learners_drop_other_numbers_but_share_the_rest_of_the_noise(other: Other) -> None:
    one, two = both(other, noise)
    assert one[0] == two[0] and one[2] == two[2]
    assert one[1] != two[1]


@pytest.mark.parametrize("what", ["loss", "gradient", "critic loss", "critic gradient"])
def test_what_is_not_finite_with_one_learner_is_left_out_by_all(other: Other, what: str) -> None:
    one, two = both(other, poisoned, what=what)
    assert one == two
    assert what.rsplit(maxsplit=1)[-1] in one[0]
    assert one[1]  # nothing moved


class Three(DistributedGroup):
    """The first of three, to look at its share alone."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 3


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    assert Three().share(torch.arange(6)).tolist() == [0, 3]
    with pytest.raises(InputError, match=r"8 rows cannot be shared by 3 learners"):
        Three().share(torch.arange(8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"online__batch": 8, "masks__groups": 2}, "online.batch is 8; give a multiple of 6"),
        ({"critic__batch": 8, "online__batch": 6}, "critic.batch is 8; give a multiple of 3"),
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


def learning(run: OnlineRun, permits: Permits, group: ProcessGroup | None = None) -> LearnerLoop:
    return LearnerLoop(run, permits, coordinator(run), group=group)


def two_runs(path: Path, **changes: Any) -> tuple[OnlineRun, OnlineRun]:
    """Alike, with the same episodes collected."""
    runs = [new_run(path / name, fleet__learners=2, **changes) for name in ("one", "two")]
    for run in runs:
        appended(run, 3)
    return runs[0], runs[1]


def test_a_run_with_a_mate_learns_what_it_would_alone(
    other: Other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes come while it learns, one always just after the first learner counted them; the mate
    sees each at the same update."""
    counted = Trainer.collected
    monkeypatch.setattr(Trainer, "collected", lambda trainer: counted(trainer) - 1)
    monkeypatch.setattr("m3pc.online.lead_learner.AGREE_SECONDS", 5.0)
    alone, shared = two_runs(tmp_path, optimiser__epsilon=1e-4, online__checkpoint_every=10)
    stop = Event()

    def collect(run: OnlineRun) -> Callable[[int], None]:
        return lambda calls: appended(run, 3 + calls) if calls < 4 else stop.set()

    expected = learning(alone, Permits(4, collect(alone)))
    expected.work(stop)
    stop.clear()
    with grouped(other, "along", run=str(shared.path)) as group:
        found = learning(shared, Permits(4, collect(shared)), group)
        found.work(stop)
    bits, updates, left_out, seen, error = other.answer()
    assert (bits, seen) == (digest(found.trainer.learner), found.trainer.seen())
    assert (updates, left_out, error) == (found.trainer.updates, 0, "")
    assert found.trainer.updates == expected.trainer.updates == 12
    assert found.trainer.seen() == expected.trainer.seen()
    for name, tensor in expected.trainer.learner.model.model.state_dict().items():
        other_one = found.trainer.learner.model.model.state_dict()[name]
        torch.testing.assert_close(other_one, tensor, rtol=0, atol=0.01 * 12 * 1e-3, msg=name)
    written = sorted(path.name for path in shared.checkpoints.iterdir())
    assert written == sorted(path.name for path in alone.checkpoints.iterdir())


def test_all_learners_go_back_and_give_up_together(other: Other, tmp_path: Path) -> None:
    _, run = two_runs(tmp_path, online__checkpoint_every=10, online__keep=1)
    stop = Event()
    with grouped(other, "along", run=str(run.path), bad_from=20) as group:
        found = learning(run, Permits(1000), group)
        with pytest.raises(DivergedError, match="again after 3 returns"):
            found.work(stop)
    bits, updates, left_out, _, error = other.answer()
    assert (updates, left_out) == (found.trainer.updates, found.trainer.left_out) == (59, 40)
    assert bits == digest(found.trainer.learner)
    assert "again after 3 returns" in error
    assert all(tensor.isfinite().all() for tensor in everything(found.trainer.learner).values())


def test_a_mate_that_dies_ends_the_learner_at_once(tmp_path: Path) -> None:
    _, run = two_runs(tmp_path)
    with Other() as other, grouped(other, "along", run=str(run.path)) as group:
        found = learning(run, Permits(4, lambda calls: os.kill(other.pid, signal.SIGKILL)), group)
        with pytest.raises(PeersLostError, match="learner 0 of 2 lost the others"):
            found.work(Event())
    assert Trainer(run).updates == 0


def test_a_mate_that_hangs_is_waited_for_no_longer_than_agreed() -> None:
    with (
        Other() as other,
        grouped(other, "hang", seconds=3) as group,
        pytest.raises(PeersLostError, match="Timed out waiting 3000ms"),
    ):
        hang(group)


def test_learners_that_do_not_come_are_not_waited_for_without_end() -> None:
    meeting = Rendezvous(host="127.0.0.1", port=9, size=2, device="cpu", seconds=1)
    with pytest.raises(PeersLostError, match="2 learners did not come together within 1 seconds"):
        join(meeting, 1)


def test_learners_that_see_other_episodes_do_not_go_on(
    other: Other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that sees another folder under the same name."""
    monkeypatch.setattr("m3pc.online.lead_learner.AGREE_SECONDS", 0.1)
    one, two = two_runs(tmp_path)
    appended(one, 5)
    with (
        pytest.raises(PeersLostError, match="did not see the same checkpoint and episodes"),
        grouped(other, "along", run=str(two.path)) as group,
    ):
        learning(one, Permits(4), group)
