"""Appends exactly once, and what a live store keeps."""

import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from m3pc.types import AckStatus, AppendKey, Durability, InputError
from replay.format.fs import FS, Disk
from replay.format.index import ProducerState
from replay.format.payload import encode
from replay.store.store import Store
from replay.store.verify import verify
from replay.writing.writer import WriterOptions
from tests.support.faults.live_writer import ROOMY, Unlocked, episode, numbers, open_writer, send
from tests.support.faults.sim_fs import Loss, SimFS

FIRST = encode(episode(0))


@pytest.fixture(params=["disk", "simulated"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> FS:
    return Disk() if request.param == "disk" else SimFS(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# Keys


def test_episodes_come_back_in_order_and_bit_for_bit(path: Path, fs: FS) -> None:
    with open_writer(path, fs=fs) as writer:
        acks = send(writer, range(5))
    assert [ack.status for ack in acks] == [AckStatus.DURABLE] * 5
    assert [ack.expected for ack in acks] == [1, 2, 3, 4, 5]
    stored = [encode(e) for e in Store(path, fs=fs).episodes()]
    assert stored == [encode(episode(number)) for number in range(5)]


def test_the_same_key_again_is_a_duplicate_and_stored_once(path: Path, fs: FS) -> None:
    with open_writer(path, fs=fs) as writer:
        send(writer, range(3))
        again = writer.append(AppendKey(0, 0, 1), encode(episode(50)))
        assert (again.status, again.expected) == (AckStatus.DUPLICATE, 3)
    with open_writer(path, fs=fs) as writer:
        assert writer.append(AppendKey(0, 0, 2), FIRST).status is AckStatus.DUPLICATE
    assert numbers(Store(path, fs=fs)) == [0, 1, 2]


def test_a_sequence_number_that_comes_too_early_is_a_gap(path: Path, fs: FS) -> None:
    with open_writer(path, fs=fs) as writer:
        assert writer.append(AppendKey(0, 0, 1), FIRST).status is AckStatus.GAP
        send(writer, range(2))
        ack = writer.append(AppendKey(0, 0, 4), FIRST)
        assert (ack.status, ack.expected) == (AckStatus.GAP, 2)
    assert numbers(Store(path, fs=fs)) == [0, 1]


def test_a_new_incarnation_fences_the_old_one(path: Path, fs: FS) -> None:
    with open_writer(path, fs=fs) as writer:
        send(writer, range(2), incarnation=4)
        assert writer.append(AppendKey(0, 5, 1), FIRST).status is AckStatus.GAP
        send(writer, range(1), incarnation=5)
        assert writer.append(AppendKey(0, 4, 2), FIRST).status is AckStatus.FENCED
        assert writer.append(AppendKey(0, 4, 0), FIRST).status is AckStatus.FENCED
        assert writer.producers[0] == ProducerState(5, 1)
        writer.roll()
    with open_writer(path, fs=fs) as writer:
        assert writer.append(AppendKey(0, 4, 2), FIRST).status is AckStatus.FENCED
        assert writer.append(AppendKey(0, 5, 1), FIRST).status is AckStatus.DURABLE


def test_each_slot_has_its_own_sequence_numbers(path: Path, fs: FS) -> None:
    with open_writer(path, fs=fs) as writer:
        for slot in (3, 0, 2**31 - 1):
            assert send(writer, range(2), slot=slot)[-1].status is AckStatus.DURABLE
    assert numbers(Store(path, fs=fs)) == [0, 1] * 3


def test_in_one_group_each_request_sees_those_before(path: Path, fs: FS) -> None:
    keys = [(0, 0, 0), (0, 0, 1), (0, 0, 1), (0, 0, 3), (0, 1, 0), (0, 0, 2), (1, 0, 0)]
    with open_writer(path, fs=fs) as writer:
        requests = [writer.request(AppendKey(*key), FIRST) for key in keys]
        statuses = [ack.status for ack in writer.commit(requests)]
    good, twice, gap, out = AckStatus.DURABLE, AckStatus.DUPLICATE, AckStatus.GAP, AckStatus.FENCED
    assert statuses == [good, good, twice, gap, good, out, good]
    assert len(numbers(Store(path, fs=fs))) == 4


@pytest.mark.parametrize(
    "key",
    [(-1, 0, 0), (2**31, 0, 0), (0, -1, 0), (0, 2**63, 0), (0, 0, -1), (True, 0, 0), ("0", 0, 0)],
    ids=str,
)
def test_an_impossible_key_is_rejected(key: tuple[int, int, int], path: Path) -> None:
    with open_writer(path) as writer:
        ack = writer.append(AppendKey(*key), FIRST)
    assert (ack.status, "is no key" in ack.reason) == (AckStatus.REJECTED, True)
    assert Store(path).totals.episodes == 0


# Payloads


def test_a_bad_payload_is_rejected_and_its_number_used(path: Path, fs: FS) -> None:
    flipped = bytearray(FIRST)
    flipped[-20] ^= 1
    with open_writer(path, fs=fs) as writer:
        ack = writer.append(AppendKey(0, 0, 0), bytes(flipped))
        assert (ack.status, ack.expected) == (AckStatus.REJECTED, 1)
        assert "(checksum)" in ack.reason
        assert writer.append(AppendKey(0, 0, 0), FIRST).status is AckStatus.DUPLICATE
        assert writer.append(AppendKey(0, 0, 1), FIRST).status is AckStatus.DURABLE
    with open_writer(path, fs=fs) as writer:
        assert writer.producers[0] == ProducerState(0, 2)
        writer.roll()
        assert writer.index.refused == 1
    assert numbers(Store(path, fs=fs)) == [0]


def test_a_producer_that_sends_only_invalid_payloads_is_fenced(path: Path) -> None:
    with open_writer(path, replace(ROOMY, max_refused=3)) as writer:
        acks = [writer.append(AppendKey(0, 0, n), b"invalid").status for n in range(4)]
        assert acks == [AckStatus.REJECTED] * 3 + [AckStatus.FENCED]
        assert writer.append(AppendKey(0, 0, 3), FIRST).status is AckStatus.FENCED
        assert writer.append(AppendKey(0, 1, 0), FIRST).status is AckStatus.DURABLE
        assert writer.append(AppendKey(1, 0, 0), FIRST).status is AckStatus.DURABLE


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_an_acknowledgement_states_its_durability(durability: Durability, path: Path) -> None:
    """And is it: without fsync a power loss takes all, with it nothing."""
    fs = SimFS(path.parent)
    writer = open_writer(path, replace(ROOMY, durability=durability), fs=fs)
    acks = send(writer, range(3))
    assert [(ack.status, ack.durability) for ack in acks] == [(AckStatus.DURABLE, durability)] * 3
    assert numbers(Store(path, fs=fs)) == [0, 1, 2]
    left = fs.after(Loss(random.Random(0), names=False, sectors="old"))
    with open_writer(path, fs=left):
        assert numbers(Store(path, fs=left)) == ([0, 1, 2] if durability == "fsync" else [])


def test_without_fsync_the_end_of_the_process_is_survived(path: Path) -> None:
    options = replace(ROOMY, durability="os")
    send(open_writer(path, options, fs=Unlocked()), range(3))
    with open_writer(path, options):
        assert numbers(Store(path)) == [0, 1, 2]


def test_without_fsync_an_end_in_order_is_as_safe_as_with_it(path: Path) -> None:
    fs = SimFS(path.parent)
    with open_writer(path, replace(ROOMY, durability="os"), fs=fs) as writer:
        send(writer, range(3))
    left = fs.after(Loss(random.Random(0), names=False, sectors="old"))
    assert numbers(Store(path, fs=left)) == [0, 1, 2]


# Segments


def test_a_log_becomes_a_segment_when_it_is_large_enough(path: Path, fs: FS) -> None:
    with open_writer(path, replace(ROOMY, segment_bytes=1000), fs=fs) as writer:
        send(writer, range(20))
        assert len(writer.index.segments) > 3
        names = [entry.name for s in writer.index.segments for entry in (s.steps, s.episodes)]
        assert fs.names(path / "segments") == sorted(names)
        assert len(fs.names(path / "log")) == 1
    assert numbers(Store(path, fs=fs)) == list(range(20))
    assert verify(path, fs=fs) == []


def test_a_log_of_invalid_payloads_becomes_no_segment_but_its_numbers_are_kept(
    path: Path, fs: FS
) -> None:
    with open_writer(path, fs=fs) as writer:
        writer.append(AppendKey(0, 0, 0), b"invalid")
        writer.roll()
        assert (writer.index.segments, writer.index.rolls) == ((), 1)
    with open_writer(path, fs=fs) as writer:
        assert writer.producers[0] == ProducerState(0, 1)


def test_retention_by_episodes_keeps_at_least_that_many(path: Path, fs: FS) -> None:
    options = replace(ROOMY, keep_episodes=6)
    with open_writer(path, options, fs=fs) as writer:
        for first in range(0, 20, 4):
            send(writer, range(first, first + 4))
            writer.roll()
        assert [s.number for s in writer.index.segments] == [3, 4]
        assert writer.index.dropped == (0, 1, 2)
        assert len(fs.names(path / "segments")) == 4
        assert writer.append(AppendKey(0, 0, 2), FIRST).status is AckStatus.DUPLICATE
    assert numbers(Store(path, fs=fs)) == list(range(12, 20))


def test_retention_by_bytes_keeps_at_most_that_many(path: Path, fs: FS) -> None:
    with open_writer(path, fs=fs) as writer:
        for first in range(0, 12, 4):
            send(writer, range(first, first + 4))
            writer.roll()
        sizes = [listed.bytes for listed in writer.index.segments]
    with open_writer(path, replace(ROOMY, keep_bytes=sum(sizes[1:])), fs=fs) as writer:
        send(writer, range(12, 13))
        writer.roll()
        assert sum(listed.bytes for listed in writer.index.segments) <= sum(sizes[1:])
        assert numbers(Store(path, fs=fs)) == list(range(8, 13))


def test_numbers_of_episodes_go_on_after_a_drop(path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(3))
        writer.roll()
        writer.drop([0])
        send(writer, range(3, 5))
        writer.roll()
    table = pa.ipc.open_file(path / "segments" / "000001.episodes.arrow").read_all()
    assert table["episode"].to_pylist() == [3, 4]
    assert table["sequence"].to_pylist() == [3, 4]


def test_a_segment_that_is_not_there_cannot_be_dropped(path: Path) -> None:
    with open_writer(path) as writer, pytest.raises(InputError, match=r"has no segments \[3\]"):
        writer.drop([3])


def test_a_withdrawn_producer_is_marked_in_every_segment(path: Path, fs: FS) -> None:
    with open_writer(path, fs=fs) as writer:
        send(writer, range(2), slot=0)
        send(writer, range(2), slot=1, incarnation=1)
        writer.roll()
        send(writer, range(1), slot=1, incarnation=2)
        assert Store(path, fs=fs).withdrawn is None
        writer.withdraw_producer(1, 1)
        store = Store(path, fs=fs)
        assert store.withdrawn is not None
        assert store.withdrawn.tolist() == [False, False, True, True, False]
        writer.withdraw_producer(1)
    withdrawn = store.latest().withdrawn
    assert withdrawn is not None and withdrawn.tolist() == [False, False, True, True, True]


# Room


def test_with_no_room_every_append_is_retried_later(path: Path) -> None:
    fs = SimFS(path.parent)
    with open_writer(path, WriterOptions(), fs=fs) as writer:
        send(writer, range(2))
        fs.free = writer.options.no_space - 1
        ack = writer.append(AppendKey(0, 0, 2), FIRST)
        assert (ack.status, ack.expected) == (AckStatus.RETRY_LATER, 2)
        fs.free = writer.options.no_space
        assert send(writer, range(2, 3))[0].status is AckStatus.DURABLE


@pytest.mark.parametrize("keep, left", [(None, [0, 1, 2]), (1 << 40, [2])])
def test_with_little_room_the_oldest_segments_are_dropped_if_allowed(
    keep: int | None, left: list[int], path: Path
) -> None:
    fs = SimFS(path.parent)
    with open_writer(path, WriterOptions(keep_bytes=keep), fs=fs) as writer:
        for number in range(3):
            send(writer, range(number, number + 1))
            writer.roll()
        fs.free = writer.options.low_space - 1
        for number in range(3, 7):
            assert send(writer, range(number, number + 1))[0].status is AckStatus.DURABLE
        assert [listed.number for listed in writer.index.segments] == left
