"""A learner of a fleet without the fleet: what it may do, what it publishes, how it comes back."""

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
from m3pc.online.learner_loop import AT_ONCE, LearnerLoop
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
from tests.support.runs.small_online import Permits, appended, coordinator, new_run, pretrained

EVERY = 5  # updates between two versions


@pytest.fixture
def run(tmp_path: Path) -> OnlineRun:
    found = new_run(
        tmp_path / "run",
        online__publish_every=EVERY,
        online__checkpoint_every=10,
        online__keep=3,
    )
    appended(found, 3)
    return found


class Watched:
    """A coordinator that remembers what was published, with the file as it was then. While it is
    `away` it answers nothing."""

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


def worked(
    run: OnlineRun,
    *,
    updates: int,
    coordinator: Coordinator,
    meanwhile: Callable[[int], None] = lambda calls: None,
    calls: int = 6,
) -> tuple[LearnerLoop, Permits]:
    """A learner that may do so many updates at each call, until it has asked so often."""
    stop = Event()

    def hear(count: int) -> None:
        meanwhile(count)
        if count == calls:
            stop.set()

    permits = Permits(updates, hear)
    found = LearnerLoop(run, permits, coordinator)
    found.work(stop)
    return found, permits


def test_it_does_as_many_updates_as_are_allowed_and_no_more(run: OnlineRun) -> None:
    asked: list[int] = []
    stop = Event()

    class Some:
        """Allows 7 in all, then nothing for a while, then 40."""

        def may_update(self, epoch: int, done: int, total: int) -> int:
            asked.append(done)
            if len(asked) == 3:
                raise StoreUnavailableError("away")
            if len(asked) == 9:
                stop.set()
            return min(total, 7 if len(asked) < 5 else 40)

    learning = LearnerLoop(run, Some(), coordinator(run))
    learning.work(stop)
    assert asked[:5] == [0, 7, 7, 7, 7]
    assert asked[5:9] == [7 + AT_ONCE, 7 + 2 * AT_ONCE, 40, 40]
    assert learning.trainer.updates == 40
    assert learning.report().waiting


def test_versions_rise_and_every_pointer_names_the_bytes_of_its_file(run: OnlineRun) -> None:
    seen = Watched(run)
    learning, permits = worked(run, updates=4, coordinator=seen, calls=7)
    epoch = learning.report().epoch
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


def test_published_and_saved_are_the_weights_at_the_end(run: OnlineRun) -> None:
    learning, _ = worked(run, updates=3, coordinator=Watched(run))
    saved = checkpoint.newest(run.checkpoints)
    assert saved.progress["updates"] == learning.trainer.updates == 15
    pointer = coordinator(run).read(WEIGHTS)
    assert pointer is not None
    published = from_bytes((run.path / pointer.path).read_bytes())
    for name, tensor in saved.weights.tensors.items():
        assert tensor.equal(published.tensors[name]), name


def test_a_version_that_was_published_stays_as_it_is(run: OnlineRun) -> None:
    """At the end of a run the newest is published again; by then the envelope may be another."""
    learning, _ = worked(run, updates=0, coordinator=Watched(run), calls=1)
    publisher, trainer = learning._publisher, learning.trainer
    version = Version(epoch=publisher.epoch, number=0)
    first = coordinator(run).read(WEIGHTS)
    trainer.update()
    assert publisher.publish(trainer.weights(version.packed), 0) == first
    assert first is not None and sha256(run.path / first.path) == first.sha256


def test_a_newer_learner_fences_the_older(run: OnlineRun) -> None:
    """The second starts while the first works; whatever the first says after that is not heard."""
    seen, second = Watched(run), Watched(run)

    def meanwhile(calls: int) -> None:
        if calls == 3:
            LearnerLoop(run, Permits(0), second)

    with pytest.raises(FencedError, match="another learner has begun"):
        worked(run, updates=EVERY, coordinator=seen, meanwhile=meanwhile)
    newest = second.read(WEIGHTS)
    assert newest is not None and newest.version == second.versions[0]
    assert newest.version.epoch > seen.versions[0].epoch


def test_while_the_coordinator_is_away_files_wait_and_the_newest_is_offered_later(
    run: OnlineRun,
) -> None:
    seen = Watched(run)

    def meanwhile(calls: int) -> None:
        seen.away = 2 <= calls < 4

    learning, _ = worked(run, updates=EVERY, coordinator=seen, meanwhile=meanwhile, calls=5)
    # Call 2 and 3 lead to 10 and 15, which are not heard of; 20 is.
    assert [version.number for version in seen.versions] == [0, 5, 20]
    counted = learning.recorder.snapshot()[PUBLISHED.name]
    assert (counted["unavailable"][0], counted["ok"][0]) == (2, 3)


def test_what_waits_is_offered_while_nothing_may_be_learnt(run: OnlineRun) -> None:
    seen, stop = Watched(run), Event()

    class Nothing:
        calls = 0

        def may_update(self, epoch: int, done: int, total: int) -> int:
            self.calls += 1
            seen.away = self.calls == 1
            if self.calls == 3:
                stop.set()
            return EVERY if self.calls == 1 else 0

    LearnerLoop(run, Nothing(), seen).work(stop)
    assert [version.number for version in seen.versions] == [0, EVERY]


def test_a_learner_that_was_killed_goes_on_from_its_checkpoint_with_newer_versions(
    run: OnlineRun,
) -> None:
    class KilledError(Exception):
        pass

    def kill(calls: int) -> None:
        if calls == 5:
            raise KilledError

    before, after = Watched(run), Watched(run)
    with pytest.raises(KilledError):
        worked(run, updates=7, coordinator=before, meanwhile=kill)
    assert before.versions[-1].number == 25
    learning = LearnerLoop(run, Permits(0), after)
    assert learning.trainer.updates == 20
    first = after.versions[0]
    assert first.number == 20
    assert first > max(before.versions)
    assert first.packed > max(version.packed for version in before.versions)
    report = learning.report()
    assert (report.updates, report.epoch) == (20, first.epoch)


def test_versions_are_newer_also_where_the_coordinator_forgot_all(run: OnlineRun) -> None:
    """The files know the epochs."""
    place = RunEndpoints(run=run.path, id=run.facts.id, coordinator="")
    one = LearnerLoop(run, Permits(0), place.connect()).report().epoch
    for path in run.path.glob("coordinator.sqlite*"):
        path.unlink()
    assert LearnerLoop(run, Permits(0), place.connect()).report().epoch > one


def test_what_is_learnt_after_the_coordinator_forgot_all_is_planned_with_and_stored(
    run: OnlineRun,
) -> None:
    LearnerLoop(run, Permits(0), coordinator(run))
    for path in run.path.glob("coordinator.sqlite*"):
        path.unlink()
    LearnerLoop(run, Permits(0), coordinator(run))
    pointer = coordinator(run).read(WEIGHTS)
    assert pointer is not None and pointer.version.epoch > 1 << PointerRecord.bits
    policy = Policy(weights_loader.read(run.path, pointer), run.config)
    decision = decision_from_bytes(
        decision_to_bytes(policy.decide(weights_loader.ordinary(policy)))
    )
    assert Version.unpacked(decision.version) == pointer.version
    episode = dataclasses.replace(next(pretrained()[1].episodes()), version=decision.version)
    with closing(Writer(run.replay, run.header)) as writer:
        writer.append(AppendKey(1, 0, 0), encode(episode))
    assert Store(run.replay).versions[-1] == decision.version
