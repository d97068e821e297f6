"""A run whose coordinator loses everything: no episode, no weights and no number is lost."""

from collections.abc import Callable
from pathlib import Path

from m3pc.core.files import sha256
from m3pc.online.recovery import WEIGHTS, recover_from_disk, weights_path
from m3pc.types import (
    AckStatus,
    AppendKey,
    Coordinator,
    Pointer,
    Published,
    RecoveredState,
    Version,
)
from replay.format.payload import encode
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.faults.live_writer import episode, numbers, open_writer
from tests.support.servers.coordinators import Place


def publish(run: Path, coordinator: Coordinator, version: Version) -> Pointer:
    """As a learner does: the file, then the pointer."""
    path = run / weights_path(version)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"weights %d %d" % (version.epoch, version.number))
    pointer = Pointer(
        version=version,
        sha256=sha256(path),
        size=path.stat().st_size,
        path=str(weights_path(version)),
    )
    assert coordinator.publish(WEIGHTS, pointer) is Published.OK
    return pointer


def append(writer: Writer, slot: int, incarnation: int, sequence: int) -> AckStatus:
    return writer.append(AppendKey(slot, incarnation, sequence), encode(episode(sequence))).status


def floor_of(run: Path) -> Callable[[], RecoveredState]:
    return lambda: recover_from_disk(run)


def test_what_the_disk_knows_is_all_that_a_new_coordinator_needs(
    place: Place, tmp_path: Path
) -> None:
    """A fresh process uses an empty coordinator: only the disk remembers anything."""
    run = tmp_path / "run"
    run.mkdir()
    before = place.client(floor_of(run))
    first = [before.register(slot) for slot in (0, 1)]
    epoch = before.new_epoch(WEIGHTS)
    with open_writer(run / "replay") as writer:
        for sequence in range(3):
            assert append(writer, 0, first[0], sequence) is AckStatus.DURABLE
        writer.roll()
        assert append(writer, 1, first[1], 0) is AckStatus.DURABLE
        published = publish(run, before, Version(epoch=epoch, number=41))
        before.close()
        place.lose()

        after = place.client(floor_of(run))
        assert after.read(WEIGHTS) == published
        second = [after.register(slot) for slot in (0, 1)]
        assert second[0] > first[0] and second[1] > first[1]
        assert append(writer, 0, second[0], 0) is AckStatus.DURABLE
        assert append(writer, 0, first[0], 3) is AckStatus.FENCED
        assert after.new_epoch(WEIGHTS) > epoch
        stale = publish_status(after, published, number=99)
        assert stale is Published.FENCED
    assert numbers(Store(run / "replay")) == [0, 1, 2, 0, 0]


def publish_status(coordinator: Coordinator, old: Pointer, number: int) -> Published:
    """The answer to a learner of the former epoch."""
    pointer = Pointer(
        version=Version(epoch=old.version.epoch, number=number),
        sha256=old.sha256,
        size=old.size,
        path=old.path,
    )
    return coordinator.publish(WEIGHTS, pointer)


def test_running_processes_survive_ten_losses(place: Place, tmp_path: Path) -> None:
    """Each goes on under its own number, before and after each loss."""
    run = tmp_path / "run"
    run.mkdir()
    actor, learner = (place.client(floor_of(run)) for _ in range(2))
    mine, epoch = actor.register(7), learner.new_epoch(WEIGHTS)
    versions: list[Version] = []
    with open_writer(run / "replay") as writer:
        for number in range(10):
            assert append(writer, 7, mine, number) is AckStatus.DURABLE
            publish(run, learner, Version(epoch=epoch, number=number))
            place.lose()
            assert actor.heartbeat(7, mine)
            seen = actor.read(WEIGHTS)
            assert seen is not None
            versions.append(seen.version)
    assert versions == [Version(epoch=epoch, number=number) for number in range(10)]
    assert numbers(Store(run / "replay")) == list(range(10))


def test_from_the_disk_of_a_new_run_nothing_is_recovered(tmp_path: Path) -> None:
    assert recover_from_disk(tmp_path) == RecoveredState()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "notes.safetensors").write_bytes(b"mine")
    with open_writer(tmp_path / "replay"):
        assert recover_from_disk(tmp_path) == RecoveredState()


def test_the_newest_weights_are_those_of_the_highest_version(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    for name in ("2-9", "10-3", "9-100", "10-2"):
        (tmp_path / "weights" / f"{name}.safetensors").write_bytes(name.encode())
    newest = recover_from_disk(tmp_path).pointers[WEIGHTS]
    assert (newest.version, newest.size) == (Version(epoch=10, number=3), 4)
    assert newest.sha256 == sha256(tmp_path / newest.path)
