"""Many threads, one writer: groups share a sync, every wait ends, damage is found meanwhile."""

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from m3pc.types import Ack, AckStatus, AppendKey
from replay.format.payload import encode
from replay.store.store import Store
from replay.store.verify import verify
from replay.writing.group_commit import GroupCommitter
from replay.writing.manifest_writer import BrokenStoreError
from replay.writing.scrubber import Scrubber
from replay.writing.writer import AppendRequest, Writer
from tests.support.faults.live_writer import HEADER, ROOMY, episode, numbers, open_writer, send
from tests.support.faults.sim_fs import SimFS


class Slow(Writer):
    """Waits in every commit until the test lets it continue; records the sizes of the groups."""

    def __init__(self, path: Path, fs: SimFS | None = None) -> None:
        super().__init__(path, HEADER, ROOMY, fs=fs)
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.groups: list[int] = []

    def commit(self, requests: Sequence[AppendRequest]) -> list[Ack]:
        self.begun.release()
        assert self.go_on.acquire(timeout=30)
        self.groups.append(len(requests))
        return super().commit(requests)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_many_producers_lose_nothing_and_repeat_nothing(path: Path) -> None:
    def produce(slot: int) -> list[AckStatus]:
        keys = [AppendKey(slot, 0, n) for n in range(20)]
        return [appender.append(key, encode(episode(key.sequence))).status for key in keys]

    with GroupCommitter(open_writer(path)) as appender, ThreadPoolExecutor(16) as threads:
        statuses = list(threads.map(produce, range(16)))
    assert statuses == [[AckStatus.DURABLE] * 20] * 16
    store = Store(path)
    keys = [tuple(row) for s in store.segments if s.keys is not None for row in s.keys.tolist()]
    assert sorted(keys) == [(slot, 0, n) for slot in range(16) for n in range(20)]
    for slot in range(16):
        assert [key[2] for key in keys if key[0] == slot] == list(range(20))
    assert verify(path) == []


def test_appends_that_come_during_a_sync_share_the_next_one(path: Path) -> None:
    writer = Slow(path)
    with GroupCommitter(writer) as appender, ThreadPoolExecutor(8) as threads:
        first = threads.submit(appender.append, AppendKey(0, 0, 0), encode(episode(0)))
        assert writer.begun.acquire(timeout=30)
        others = [
            threads.submit(appender.append, AppendKey(slot, 0, 0), encode(episode(0)))
            for slot in range(1, 8)
        ]
        while appender.waiting < 7:
            assert not first.done()
        writer.go_on.release(2)
        assert {f.result(30).status for f in [first, *others]} == {AckStatus.DURABLE}
    assert writer.groups == [1, 7]


def test_an_append_that_takes_too_long_is_to_be_sent_again(path: Path) -> None:
    writer = Slow(path)
    appender = GroupCommitter(writer, deadline=0.05)
    ack = appender.append(AppendKey(0, 0, 0), encode(episode(0)))
    assert (ack.status, "may be stored or not" in ack.reason) == (AckStatus.RETRY_LATER, True)
    writer.go_on.release(9)
    assert writer.begun.acquire(timeout=30)
    appender.close()
    assert numbers(Store(path)) == [0]
    with open_writer(path) as again:
        assert send(again, range(1))[0].status is AckStatus.DUPLICATE


def test_a_broken_store_is_an_error_for_every_producer(path: Path) -> None:
    fs = SimFS(path.parent)
    with GroupCommitter(open_writer(path, fs=fs)) as appender:
        assert appender.append(AppendKey(0, 0, 0), encode(episode(0))).status is AckStatus.DURABLE
        fs.fails_at = dict.fromkeys(range(fs.calls, fs.calls + 100), errno.EIO)
        for slot in range(3):
            with pytest.raises(BrokenStoreError):
                appender.append(AppendKey(slot, 1, 0), encode(episode(0)))
        fs.fails_at = {}


def test_no_thread_is_left(path: Path) -> None:
    before = threading.active_count()
    with GroupCommitter(open_writer(path)) as appender, Scrubber(appender):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_the_scrubber_quarantines_damage_while_appends_go_on(path: Path) -> None:
    with GroupCommitter(open_writer(path)) as appender:
        for number in range(3):
            appender.append(AppendKey(0, 0, number), encode(episode(number)))
            appender.call(Writer.roll)
        file = path / "segments" / "000001.episodes.arrow"
        content = bytearray(file.read_bytes())
        content[400] ^= 16
        file.write_bytes(content)
        with Scrubber(appender, min_pause=0.001) as scrubber:
            for number in range(3, 400):
                appender.append(AppendKey(0, 0, number), encode(episode(number)))
                if scrubber.damaged and scrubber.checked >= 5:
                    break
        assert scrubber.damaged == 1
        assert [event.number for event in appender.writer.index.quarantined] == [1]
    stored = numbers(Store(path))
    assert stored[:2] == [0, 2] and stored[2:] == list(range(3, 3 + len(stored) - 2))
    assert verify(path) == []
