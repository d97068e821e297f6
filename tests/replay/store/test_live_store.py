"""Readers of a store that grows: views are complete, in order, and cheap to refresh."""

import mmap
import multiprocessing
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from m3pc.types import AppendKey, Durability, InputError
from replay.format.fs import Disk
from replay.format.segment import COLUMNS
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.faults.live_writer import (
    HEADER,
    ROOMY,
    Unlocked,
    episode,
    numbers,
    open_writer,
    send,
    write_live,
)

SMALL = replace(ROOMY, segment_bytes=1500)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_an_empty_store_is_a_store(path: Path) -> None:
    with open_writer(path):
        store = Store(path)
    assert (store.segments, store.totals.episodes, len(store.lengths)) == ((), 0, 0)
    assert list(store.episodes()) == []


def test_what_was_committed_is_seen_at_once_and_an_old_view_stays_as_it_was(path: Path) -> None:
    with open_writer(path, SMALL) as writer:
        views = [Store(path)]
        for number in range(30):
            send(writer, range(number, number + 1))
            views.append(views[-1].latest())
    for count, view in enumerate(views):
        assert numbers(view) == list(range(count))
        assert view.totals.steps == sum(len(episode(n)) for n in range(count))


def test_segments_that_stay_are_the_same_objects(path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(4))
        writer.roll()
        one = Store(path)
        send(writer, range(4, 6))
        two = one.latest()
        assert two.segments[0] is one.segments[0]
        writer.roll()
        three = two.latest()
        assert three.segments[0] is one.segments[0]
        assert [len(view.segments) for view in (one, two, three)] == [1, 2, 2]
        assert three.latest().segments == three.segments


def test_the_end_of_a_long_log_is_few_chunks(path: Path) -> None:
    with open_writer(path) as writer:
        store = Store(path)
        for number in range(200):
            send(writer, range(number, number + 1))
            store = store.latest()
    assert numbers(store) == list(range(200))
    assert len(store.segments) <= 12


def test_all_columns_are_the_same_in_the_log_and_in_a_segment(path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(3))
        send(writer, range(2), slot=4, incarnation=9)
        (before,) = Store(path).segments
        writer.roll()
        (after,) = Store(path).segments
    for name in COLUMNS:
        one, other = getattr(before, name), getattr(after, name)
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, strict=True)
    assert before.keys is not None
    assert before.keys.tolist()[3:] == [[4, 9, 0], [4, 9, 1]]


def test_a_reader_knows_the_state_of_every_producer(path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(3), slot=1, incarnation=7)
        writer.append(AppendKey(2, 5, 0), b"invalid")
        writer.roll()
        send(writer, range(1), slot=1, incarnation=8)
        store = Store(path)
        assert store.producers == {1: (8, 1), 2: (5, 1)}
        send(writer, range(1, 2), slot=1, incarnation=8)
        assert store.latest().producers == {1: (8, 2), 2: (5, 1)}
        assert {slot: writer.producers[slot] for slot in (1, 2)} == store.latest().producers


def test_a_store_that_did_not_change_is_the_same_view(path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(3))
        store = Store(path)
        assert store.latest() is store
        for change in (writer.roll, lambda: writer.withdraw_producer(3), lambda: writer.drop([0])):
            change()
            newer = store.latest()
            assert newer is not store
            assert newer.latest() is newer
            store = newer


def test_dropped_segments_are_freed(path: Path) -> None:
    with open_writer(path) as writer:
        for number in range(3):
            send(writer, range(number, number + 1))
            writer.roll()
        store = Store(path)
        dropped, kept = (weakref.ref(segment) for segment in store.segments[1:])
        writer.drop([0, 1])
        assert numbers(store) == [0, 1, 2]
        store = store.latest()
        assert numbers(store) == [2]
        assert dropped() is None
        assert kept() is store.segments[0]


def test_damaged_segments_are_refused_or_left_out(path: Path) -> None:
    write_live(path)
    file = path / "segments" / "000001.steps.arrow"
    content = bytearray(file.read_bytes())
    content[700] ^= 4
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"000001\.steps\.arrow was changed"):
        Store(path)
    store = Store(path, skip_damaged=True)
    assert numbers(store) == list(range(8, 16))
    assert list(store.damaged) == [1]
    assert store.latest().damaged == store.damaged


def test_a_checksum_names_what_a_store_holds(path: Path) -> None:
    with open_writer(path) as writer:
        checksums = [Store(path).checksum]
        for number in range(2):
            send(writer, range(number, number + 1))
            checksums.append(Store(path).checksum)
        assert len(set(checksums)) == 3
        assert Store(path).checksum == checksums[-1]


@pytest.mark.parametrize("name", ["MANIFEST", "log/000003.log"])
def test_a_store_without_its_manifest_or_log_is_refused(name: str, path: Path) -> None:
    write_live(path)
    (path / name).unlink()
    with pytest.raises(InputError):
        Store(path)


@pytest.mark.parametrize("content", [None, b"", b"x" * 56])
def test_without_its_mark_a_store_is_read_to_the_last_complete_frame(
    content: bytes | None, path: Path
) -> None:
    write_live(path)
    if content is None:
        (path / "MARK").unlink()
    else:
        (path / "MARK").write_bytes(content)
    assert numbers(Store(path)) == list(range(4, 16))
    with (path / "log" / "000003.log").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 3)
    assert numbers(Store(path)) == list(range(4, 15))


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_log_shorter_than_its_mark_is_damage_where_it_was_synced(
    durability: Durability, path: Path
) -> None:
    """Without fsync a power loss may do that, and no promise is broken."""
    writer = open_writer(path, replace(ROOMY, durability=durability), fs=Unlocked())
    send(writer, range(3))
    with (path / "log" / "000000.log").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 30)
    if durability == "os":
        assert numbers(Store(path)) == [0, 1]
    else:
        with pytest.raises(InputError, match=r"000000\.log was changed"):
            Store(path)


@pytest.mark.parametrize("other", ["header", "number"])
def test_a_log_of_another_store_is_refused(other: str, path: Path, tmp_path: Path) -> None:
    """Of one with other settings and as many segments; of one with the same and fewer."""
    write_live(path)
    header = HEADER.model_copy(update={"max_episode_steps": 99}) if other == "header" else HEADER
    with Writer(tmp_path / "other", header, ROOMY) as writer:
        for number in range(3 if other == "header" else 0):
            send(writer, range(number, number + 1))
            writer.roll()
    (log,) = (tmp_path / "other" / "log").iterdir()
    shutil.copy(log, path / "log" / "000003.log")
    with pytest.raises(InputError, match="head is not that of this store"):
        Store(path)


def test_what_is_written_and_not_yet_acknowledged_is_not_seen(path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(2))
        before = (path / "MARK").read_bytes()
        send(writer, range(2, 3))
        (path / "MARK").write_bytes(before)
        assert numbers(Store(path)) == [0, 1]


class Overtaken(Disk):
    """Something happens right after the manifest was read for the first time."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens: Callable[[], None] | None = happens

    def map(self, path: Path) -> bytes | mmap.mmap:
        content = super().map(path)
        if path.name == "MANIFEST" and self._happens:
            happens, self._happens = self._happens, None
            content = bytes(content)
            happens()
        return content


def test_changes_during_a_read_are_seen_by_the_next_read(path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(2))
        store = Store(path, fs=Overtaken(lambda: writer.withdraw_producer(0)))
        assert store.withdrawn is None
        withdrawn = store.latest().withdrawn
        assert withdrawn is not None and withdrawn.tolist() == [True, True]


def grow(path: Path, count: int, stop: "multiprocessing.synchronize.Event") -> None:
    options = replace(SMALL, keep_episodes=40)
    with open_writer(path, options) as writer:
        for number in range(count):
            send(writer, range(number, number + 1))
            if stop.is_set():
                return


def test_readers_and_a_writer_in_different_processes_get_along(path: Path) -> None:
    """Each view is a run of episodes without holes that ends later than the one before."""
    open_writer(path).close()
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    child = context.Process(target=grow, args=(path, 400, stop), daemon=True)
    child.start()
    store, views, last = Store(path), 0, -1
    try:
        while child.is_alive():
            child.join(0.001)
            store = (store if views % 3 else Store(path)).latest()
            seen = numbers(store)
            assert seen == list(range(seen[0], seen[-1] + 1)) if seen else last == -1
            assert not seen or seen[-1] >= last
            last = seen[-1] if seen else last
            views += 1
    finally:
        stop.set()
        child.join(60)
    assert child.exitcode == 0
    assert numbers(store.latest())[-1] >= last >= 0
    assert views > 5
