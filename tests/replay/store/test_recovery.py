"""A writer on failing disks, in folders that are no stores, and with damaged files."""

import errno
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from m3pc.types import AckStatus, AppendKey, InputError
from replay.format import manifest
from replay.format.index import ProducerState, index_of
from replay.format.log import HEAD
from replay.format.manifest import FileEntry, Roll
from replay.format.payload import encode
from replay.store.store import Store
from replay.store.verify import verify
from replay.writing.manifest_writer import BrokenStoreError
from replay.writing.writer import Writer
from tests.support.episodes.episodes import header
from tests.support.episodes.foreign_files import write_small_store
from tests.support.faults.live_writer import ROOMY, episode, numbers, open_writer, send, write_live
from tests.support.faults.sim_fs import Loss, SimFS

FIRST = encode(episode(0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# Failing disks


def test_a_full_disk_is_waited_out(path: Path) -> None:
    fs = SimFS(path.parent)
    with open_writer(path, fs=fs) as writer:
        send(writer, range(1))
        fs.fails_at = {fs.calls: errno.ENOSPC}
        ack = writer.append(AppendKey(0, 0, 1), FIRST)
        assert (ack.status, ack.expected) == (AckStatus.RETRY_LATER, 1)
        assert send(writer, range(1, 2))[0].status is AckStatus.DURABLE
    assert numbers(Store(path, fs=fs)) == [0, 1]


def test_a_line_that_did_not_fit_leaves_nothing_in_the_manifest(path: Path) -> None:
    fs = SimFS(path.parent)
    with open_writer(path, fs=fs) as writer:
        fs.fails_at = {fs.calls: errno.ENOSPC}
        with pytest.raises(OSError, match="planned"):
            writer.withdraw_producer(3)
        writer.withdraw_producer(4)
    assert verify(path, fs=fs) == []
    with open_writer(path, fs=fs) as writer:
        assert [event.slot for event in writer.index.withdrawn] == [4]


def test_after_a_failed_sync_the_log_is_left_and_nothing_is_lost(path: Path) -> None:
    fs = SimFS(path.parent)
    writer = open_writer(path, fs=fs)
    send(writer, range(2))
    fs.fails_at = {fs.calls + 1: errno.EIO}
    assert send(writer, range(2, 3))[0].status is AckStatus.DURABLE
    assert (writer.index.rolls, len(writer.index.segments)) == (1, 1)
    left = fs.after(Loss(random.Random(0), names=False, sectors="old"))
    with open_writer(path, fs=left):
        assert numbers(Store(path, fs=left)) == [0, 1, 2]


def test_a_sync_that_fails_for_lack_of_room_is_a_failed_sync(path: Path) -> None:
    """Its bytes may be lost: what is sent again must not rely on them."""
    fs = SimFS(path.parent)
    writer = open_writer(path, fs=fs)
    send(writer, range(2))
    fs.fails_at = {fs.calls + 1: errno.ENOSPC}
    assert send(writer, range(2, 4))[-1].status is AckStatus.DURABLE
    assert writer.index.rolls == 1
    left = fs.after(Loss(random.Random(0), names=False, sectors="old"))
    with open_writer(path, fs=left):
        assert numbers(Store(path, fs=left)) == [0, 1, 2, 3]


def test_a_segment_has_the_number_of_its_log() -> None:
    entry = FileEntry(name="000001.steps.arrow", rows=1, bytes=1, sha256="0" * 64)
    other = entry.model_copy(update={"name": "000000.episodes.arrow"})
    live = header().model_copy(update={"event": "live"})
    roll = Roll(number=0, steps=entry, episodes=other, refused=0, producers=[])
    with pytest.raises(InputError, match="does not fit what comes before"):
        index_of([live, roll], Path("MANIFEST"))


def test_a_manifest_that_is_full_takes_no_line_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_writer(path, replace(ROOMY, segment_bytes=1000)) as writer:
        send(writer, range(2))
        monkeypatch.setattr(manifest, "MAX_BYTES", (path / "MANIFEST").stat().st_size + 50)
        assert {ack.status for ack in send(writer, range(2, 20))} == {AckStatus.DURABLE}
        with pytest.raises(OSError, match="go on with another store"):
            writer.roll()
    with open_writer(path):
        assert numbers(Store(path)) == list(range(20))


def test_a_disk_that_fails_twice_breaks_the_store_until_it_is_opened_again(path: Path) -> None:
    fs = SimFS(path.parent)
    writer = open_writer(path, fs=fs)
    send(writer, range(2))
    fs.fails_at = dict.fromkeys(range(fs.calls, fs.calls + 40), errno.EIO)
    for _ in range(2):
        with pytest.raises(BrokenStoreError, match="what was acknowledged is safe"):
            send(writer, range(2, 3))
    writer.close()
    fs.fails_at = {}
    with open_writer(path, fs=fs) as writer:
        assert numbers(Store(path, fs=fs))[:2] == [0, 1]
        assert send(writer, range(2, 3))[0].status in (AckStatus.DURABLE, AckStatus.DUPLICATE)


# Opening


def test_a_store_has_one_writer(path: Path) -> None:
    with open_writer(path), pytest.raises(InputError, match="written by another process"):
        open_writer(path)
    open_writer(path).close()


def test_other_settings_than_those_it_was_made_with_are_refused(path: Path) -> None:
    open_writer(path).close()
    with pytest.raises(InputError, match="was made for"):
        Writer(path, header(states=3))


def test_a_finished_data_set_takes_no_more(tmp_path: Path) -> None:
    store = write_small_store(tmp_path / "store", np.random.default_rng(0))
    before = Store(store).checksum
    with pytest.raises(InputError, match="is a finished data set"):
        open_writer(store)
    assert Store(store).checksum == before


def test_a_folder_with_other_things_is_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"holds thesis\.tex and no MANIFEST"):
        open_writer(path)
    assert os.listdir(path) == ["thesis.tex"]


def test_a_store_whose_manifest_is_missing_is_not_overwritten(path: Path) -> None:
    write_live(path)
    (path / "MANIFEST").unlink()
    files = sorted(path.rglob("*"))
    with pytest.raises(InputError, match="restore the manifest"):
        open_writer(path)
    assert sorted(path.rglob("*")) == files


def test_a_parent_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no is no folder"):
        open_writer(tmp_path / "no" / "store")


def test_unlisted_files_are_quarantined_and_not_deleted(path: Path) -> None:
    write_live(path)
    (path / "segments" / "000000.steps.arrow").write_bytes(b"left of a dropped one")
    (path / "segments" / "000003.steps.arrow").write_bytes(b"left of an unfinished seal")
    (path / "segments" / "000900.steps.arrow").write_bytes(b"of another store")
    (path / "segments" / "notes.txt").write_bytes(b"mine")
    assert len(verify(path)) == 4
    open_writer(path).close()
    assert verify(path) == []
    assert sorted(os.listdir(path / "quarantine")) == ["000900.steps.arrow", "notes.txt"]
    assert (path / "quarantine" / "notes.txt").read_bytes() == b"mine"


# Damage


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_damage_in_the_log_stops_the_writer_unless_the_loss_is_accepted(path: Path) -> None:
    write_live(path)
    log = path / "log" / "000003.log"
    before = log.read_bytes()
    flip(log, len(before) // 2)
    rotten = log.read_bytes()
    with pytest.raises(InputError, match=r"000003\.log is damaged.*drop STORE --damaged"):
        open_writer(path)
    assert log.read_bytes() == rotten
    with open_writer(path, accept_loss=True) as writer:
        kept = numbers(Store(path))
        assert kept[:8] == list(range(4, 12))
        assert len(kept[8:]) == 3 and set(kept[8:]) < set(range(12, 16))
        assert writer.producers[0] == ProducerState(0, 16)
    assert (path / "quarantine" / "000003.log").read_bytes() == rotten
    assert verify(path) == []
    open_writer(path).close()


def test_a_line_that_changed_among_others_is_damage_even_without_a_mark(path: Path) -> None:
    write_live(path)
    (path / "MARK").unlink()
    flip(path / "MANIFEST", 400)
    with pytest.raises(InputError, match="MANIFEST is damaged: line 2 is not what was written"):
        open_writer(path)


def test_a_frame_that_is_in_the_log_twice_counts_once(path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(1))
        one = (path / "log" / "000000.log").stat().st_size
        send(writer, range(1, 2))
    (path / "MARK").unlink()
    with (path / "log" / "000000.log").open("r+b") as file:
        content = file.read()
        file.write(content[HEAD.size : one])
    with open_writer(path):
        assert numbers(Store(path)) == [0, 1]


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_damaged_segment_is_quarantined_if_the_loss_is_accepted(how: str, path: Path) -> None:
    write_live(path)
    file = path / "segments" / "000001.steps.arrow"
    flip(file, 500) if how == "flipped" else file.unlink()
    if how == "missing":
        with pytest.raises(InputError, match=r"000001\.steps\.arrow is damaged"):
            open_writer(path)
    with open_writer(path, accept_loss=True) as writer:
        assert [event.number for event in writer.index.quarantined] == [1]
    assert numbers(Store(path)) == list(range(8, 16))
    assert verify(path) == []
    assert "000001.episodes.arrow" in os.listdir(path / "quarantine")


def test_a_damaged_segment_is_found_and_quarantined_by_number(path: Path) -> None:
    write_live(path)
    flip(path / "segments" / "000002.episodes.arrow", 300)
    with open_writer(path) as writer:
        assert [bool(writer.check_segment(number)) for number in (0, 1, 2)] == [False, False, True]
        writer.quarantine(2, writer.check_segment(2))
        assert "was changed" in writer.index.quarantined[0].reason
        assert not writer.check_segment(2)
    assert numbers(Store(path)) == [*range(4, 8), *range(12, 16)]
    assert verify(path) == []


def test_a_quarantine_that_was_cut_short_is_finished_by_the_next_writer(path: Path) -> None:
    write_live(path)
    names = [f"000001.{kind}.arrow" for kind in ("steps", "episodes")]
    with open_writer(path) as writer:
        writer.quarantine(1, "a test")
    for name in names:
        (path / "quarantine" / name).rename(path / "segments" / name)
    open_writer(path).close()
    assert set(names) <= set(os.listdir(path / "quarantine"))
    assert verify(path) == []
