"""The learner process without other processes: updates, published versions, restarts."""

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from m3pc.coordinator.records import PointerRecord
from m3pc.core.files import sha256
from m3pc.distributed.endpoints import RunEndpoints
from m3pc.model import checkpoint
from m3pc.model.weights import from_bytes
from m3pc.online.learner_loop import UPDATES_PER_PERMIT, LearnerLoop
from m3pc.online.recovery import WEIGHTS
from m3pc.online.run_folder import OnlineRun
from m3pc.telemetry.catalogue import PUBLISHED
from m3pc.types import (
    AppendKey,
    Coordinator,
    CoordinatorUnavailableError,
    FencedError,
    Pointer,
    Published,
    StoreUnavailableError,
    Version,
)
from planner.policy import Policy
from planner.server import weights_loader
from planner.server.wire import decision_from_bytes, decision_to_bytes
from replay.format.payload import encode
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.runs.small_online import (
    AllowedUpdates,
    append_episodes,
    coordinator,
    new_run,
    pretrained,
)

EVERY = 5  # updates between two versions


@pytest.fixture
def run(tmp_path: Path) -> OnlineRun:
    online_run = new_run(
        tmp_path / "run",
        online__publish_every=EVERY,
        online__checkpoint_every=10,
        online__keep=3,
    )
    append_episodes(online_run, 3)
    return online_run


class RecordingCoordinator:
    """Records each published pointer with the bytes of its file. While `away`, it does not accept
    any."""

    def __init__(self, run: OnlineRun) -> None:
        self._run, self._real, self.away = run, coordinator(run), False
        self.published: list[tuple[Pointer, bytes]] = []

    def new_epoch(self, name: str) -> int:
        return self._real.new_epoch(name)

    def read(self, name: str) -> Pointer | None:
        return self._real.read(name)

    def publish(self, name: str, pointer: Pointer) -> Published:
        if self.away:
            raise CoordinatorUnavailableError("away")
        self.published.append((pointer, (self._run.path / pointer.path).read_bytes()))
        return self._real.publish(name, pointer)

    @property
    def versions(self) -> list[Version]:
        return [pointer.version for pointer, _ in self.published]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def run_learner(
    run: OnlineRun,
    *,
    updates: int,
    coordinator: Coordinator,
    meanwhile: Callable[[int], None] = lambda calls: None,
    calls: int = 6,
) -> tuple[LearnerLoop, AllowedUpdates]:
    """A learner that may do `updates` more at each of its `calls` requests, and then stops."""
    stop = Event()

    def on_call(count: int) -> None:
        meanwhile(count)
        if count == calls:
            stop.set()

    permits = AllowedUpdates(updates, on_call)
    loop = LearnerLoop(run, permits, coordinator)
    loop.work(stop)
    return loop, permits


def test_it_does_as_many_updates_as_are_allowed_and_no_more(run: OnlineRun) -> None:
    asked: list[int] = []
    stop = Event()

    class SomeUpdates:
        """Allows 7 in all, then nothing for a while, then 40."""

        def may_update(self, epoch: int, done: int, total: int) -> int:
            asked.append(done)
            if len(asked) == 3:
                raise StoreUnavailableError("away")
            if len(asked) == 9:
                stop.set()
            return min(total, 7 if len(asked) < 5 else 40)

    learning = LearnerLoop(run, SomeUpdates(), coordinator(run))
    learning.work(stop)
    assert asked[:5] == [0, 7, 7, 7, 7]
    assert asked[5:9] == [7 + UPDATES_PER_PERMIT, 7 + 2 * UPDATES_PER_PERMIT, 40, 40]
    assert learning.trainer.updates == 40
    assert learning.report().detail.waiting


def test_versions_rise_and_every_pointer_has_the_hash_of_its_file(run: OnlineRun) -> None:
    seen = RecordingCoordinator(run)
    learning, permits = run_learner(run, updates=4, coordinator=seen, calls=7)
    epoch = learning.report().detail.epoch
    assert set(permits.epochs) == {epoch}
    assert learning.trainer.updates == 24
    numbers = [0, *range(EVERY, 25, EVERY), 24]  # at its start, every few updates, at its end
    assert seen.versions == [Version(epoch=epoch, number=number) for number in numbers]
    for pointer, content in seen.published:
        weights = from_bytes(content)
        assert len(content) == pointer.size
        assert hashlib.sha256(content).hexdigest() == pointer.sha256
        assert weights.version == pointer.version.packed
        assert all(tensor.isfinite().all() for tensor in weights.tensors.values())
    last = seen.read(WEIGHTS)
    assert last == seen.published[-1][0]
    assert last is not None and sha256(run.path / last.path) == last.sha256
    kept = sorted(path.name for path in (run.path / WEIGHTS).iterdir())
    assert kept == sorted(f"{epoch}-{number}.safetensors" for number in numbers[-3:])


def test_the_final_weights_are_published_and_saved(run: OnlineRun) -> None:
    learning, _ = run_learner(run, updates=3, coordinator=RecordingCoordinator(run))
    saved = checkpoint.read_newest(run.checkpoints)
    assert saved.progress["updates"] == learning.trainer.updates == 15
    pointer = coordinator(run).read(WEIGHTS)
    assert pointer is not None
    published = from_bytes((run.path / pointer.path).read_bytes())
    for name, tensor in saved.weights.tensors.items():
        assert tensor.equal(published.tensors[name]), name


def test_a_published_version_never_changes(run: OnlineRun) -> None:
    """At the end of a run the newest is published again; its envelope may have changed by then."""
    learning, _ = run_learner(run, updates=0, coordinator=RecordingCoordinator(run), calls=1)
    publisher, version = learning.publisher, Version(epoch=learning.publisher.epoch, number=0)
    first = coordinator(run).read(WEIGHTS)
    learning.trainer.update()
    later = dataclasses.replace(learning.trainer.weights(), version=version.packed)
    assert publisher.publish(later) == first
    assert first is not None and sha256(run.path / first.path) == first.sha256


def test_a_newer_learner_fences_the_older(run: OnlineRun) -> None:
    """The second starts while the first works; later versions of the first are refused."""
    seen, second = RecordingCoordinator(run), RecordingCoordinator(run)

    def meanwhile(calls: int) -> None:
        if calls == 3:
            LearnerLoop(run, AllowedUpdates(0), second)

    with pytest.raises(FencedError, match="another learner has begun"):
        run_learner(run, updates=EVERY, coordinator=seen, meanwhile=meanwhile)
    newest = second.read(WEIGHTS)
    assert newest is not None and newest.version == second.versions[0]
    assert newest.version.epoch > seen.versions[0].epoch


def test_after_an_outage_of_the_coordinator_the_newest_version_is_published(
    run: OnlineRun,
) -> None:
    seen = RecordingCoordinator(run)

    def meanwhile(calls: int) -> None:
        seen.away = 2 <= calls < 4

    learning, _ = run_learner(run, updates=EVERY, coordinator=seen, meanwhile=meanwhile, calls=5)
    # Call 2 and 3 lead to 10 and 15, which are not heard of; 20 is.
    assert [version.number for version in seen.versions] == [0, 5, 20]
    counted = learning.recorder.snapshot()[PUBLISHED.name]
    assert (counted["unavailable"][0], counted["ok"][0]) == (2, 3)


def test_a_pending_version_is_published_while_no_update_is_allowed(run: OnlineRun) -> None:
    seen, stop = RecordingCoordinator(run), Event()

    class UpdatesOnce:
        calls = 0

        def may_update(self, epoch: int, done: int, total: int) -> int:
            self.calls += 1
            seen.away = self.calls == 1
            if self.calls == 3:
                stop.set()
            return EVERY if self.calls == 1 else 0

    LearnerLoop(run, UpdatesOnce(), seen).work(stop)
    assert [version.number for version in seen.versions] == [0, EVERY]


def test_a_killed_learner_continues_from_its_checkpoint_with_newer_versions(
    run: OnlineRun,
) -> None:
    class KilledError(Exception):
        pass

    def kill(calls: int) -> None:
        if calls == 5:
            raise KilledError

    before, after = RecordingCoordinator(run), RecordingCoordinator(run)
    with pytest.raises(KilledError):
        run_learner(run, updates=7, coordinator=before, meanwhile=kill)
    assert before.versions[-1].number == 25
    learning = LearnerLoop(run, AllowedUpdates(0), after)
    assert learning.trainer.updates == 20
    first = after.versions[0]
    assert first.number == 20
    assert first > max(before.versions)
    assert first.packed > max(version.packed for version in before.versions)
    status = learning.report().detail
    assert (status.updates, status.epoch) == (20, first.epoch)


def test_versions_are_newer_even_if_the_coordinator_lost_its_state(run: OnlineRun) -> None:
    """The names of the files have the epochs."""
    place = RunEndpoints(run=run.path, id=run.info.id, coordinator="")
    one = LearnerLoop(run, AllowedUpdates(0), place.connect()).report().detail.epoch
    for path in run.path.glob("coordinator.sqlite*"):
        path.unlink()
    assert LearnerLoop(run, AllowedUpdates(0), place.connect()).report().detail.epoch > one


def test_versions_after_the_coordinator_lost_its_state_can_be_planned_with_and_stored(
    run: OnlineRun,
) -> None:
    LearnerLoop(run, AllowedUpdates(0), coordinator(run))
    for path in run.path.glob("coordinator.sqlite*"):
        path.unlink()
    LearnerLoop(run, AllowedUpdates(0), coordinator(run))
    pointer = coordinator(run).read(WEIGHTS)
    assert pointer is not None and pointer.version.epoch > 1 << PointerRecord.bits
    policy = Policy(weights_loader.read_published(run.path, pointer), run.config)
    decision = decision_from_bytes(
        decision_to_bytes(policy.decide(weights_loader.typical_window(policy)))
    )
    assert Version.unpacked(decision.version) == pointer.version
    episode = dataclasses.replace(next(pretrained()[1].episodes()), version=decision.version)
    with closing(Writer(run.replay, run.header)) as writer:
        writer.append(AppendKey(1, 0, 0), encode(episode))
    assert [e.version for e in Store(run.replay).episodes()][-1] == decision.version
