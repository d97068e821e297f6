"""The audit of a run finds what a store lost, doubled, changed or left out."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.ack_log import AckLog
from actors.outbox import OnAck
from m3pc.online.delivery_audit import audit
from m3pc.types import Ack, AckStatus, AppendKey
from replay.format.payload import encode
from replay.writing.writer import Writer
from tests.support.episodes.episodes import numbered
from tests.support.faults.live_writer import ROOMY
from tests.support.runs.small_online import new_run

LENGTHS = (3, 4, 5, 6)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two producers with two episodes each, all acknowledged."""
    path = tmp_path_factory.mktemp("audited") / "run"
    run = new_run(path)
    with Writer(run.replay, run.header, ROOMY) as writer:
        for number, length in enumerate(LENGTHS):
            key = AppendKey(number % 2, 0, number // 2)
            payload = encode(numbered(number, length))
            ack = writer.append(key, payload)
            assert ack.status is AckStatus.DURABLE
            _receive(path, key, ack, payload)
    return path


def _receive(path: Path, key: AppendKey, ack: Ack, payload: bytes) -> None:
    receipts = AckLog(path / "receipts" / f"{key.slot}.jsonl")
    digest = hashlib.sha256(payload).hexdigest()
    receipts(OnAck(key=key, ack=ack, steps=0, sha256=digest))
    receipts.close()


@pytest.fixture
def run(collected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(collected, tmp_path / "run"))


def test_a_store_that_holds_all_receipts_is_sound(run: Path) -> None:
    found = audit(run)
    assert (found.acknowledged, found.stored, found.sound) == (4, 4, True)


def test_what_was_stored_but_not_acknowledged_is_no_fault(run: Path) -> None:
    (run / "receipts" / "1.jsonl").unlink()
    found = audit(run)
    assert (found.acknowledged, found.stored, found.sound) == (2, 4, True)


def test_a_receipt_that_a_kill_cut_short_is_left_out(run: Path) -> None:
    with (run / "receipts" / "1.jsonl").open("a") as file:
        file.write('{"slot": 1, "incar')
    assert audit(run).acknowledged == 4


def _edited(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    """The second receipt of slot 1, changed."""

    def damage(run: Path) -> None:
        path = run / "receipts" / "1.jsonl"
        first, second = path.read_text().splitlines()
        row = json.loads(second)
        change(row)
        path.write_text(f"{first}\n{json.dumps(row)}\n")

    return damage


def test_an_acknowledged_episode_that_is_not_stored_is_lost(run: Path) -> None:
    _edited(lambda row: row.update(sequence=7))(run)
    found = audit(run)
    assert (found.lost, found.sound) == ([AppendKey(1, 0, 7)], False)


def test_an_episode_with_other_bytes_than_those_acknowledged_is_changed(run: Path) -> None:
    _edited(lambda row: row.update(sha256="0" * 64))(run)
    found = audit(run)
    assert (found.changed, found.sound) == ([AppendKey(1, 0, 1)], False)


def test_two_of_one_key_and_a_missing_one_before_others_are_found(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No writer of ours makes such a store, so its keys are told wrongly here."""
    told = [AppendKey(0, 0, 0), AppendKey(0, 0, 0), AppendKey(1, 0, 0), AppendKey(1, 0, 3)]
    monkeypatch.setattr("replay.store.store.Store.keys", told)
    found = audit(run)
    assert found.duplicated == [AppendKey(0, 0, 0)]
    assert found.gaps == [AppendKey(1, 0, 1), AppendKey(1, 0, 2)]
    assert not found.sound
