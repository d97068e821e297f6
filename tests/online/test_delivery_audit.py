"""The audit of a run finds episodes that its store lost, duplicated, changed or left out."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.outbox import AckedEpisode, AckLog
from m3pc.online.delivery_audit import audit_deliveries
from m3pc.types import Ack, AckStatus, AppendKey
from replay.format.payload import encode
from replay.writing.writer import Writer
from tests.support.episodes.episodes import numbered
from tests.support.faults.live_writer import ROOMY
from tests.support.runs.commands import assert_one_sentence, invoke
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
            _acknowledge(path, key, ack, payload)
    return path


def _acknowledge(path: Path, key: AppendKey, ack: Ack, payload: bytes) -> None:
    receipts = AckLog(path / "receipts" / f"{key.slot}.jsonl")
    digest = hashlib.sha256(payload).hexdigest()
    receipts(AckedEpisode(key=key, ack=ack, steps=0, sha256=digest))
    receipts.close()


@pytest.fixture
def run(collected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(collected, tmp_path / "run"))


def test_a_store_with_every_acknowledged_episode_is_sound(run: Path) -> None:
    deliveries = audit_deliveries(run)
    assert (deliveries.acknowledged, deliveries.stored, deliveries.sound) == (4, 4, True)


def test_an_episode_that_is_stored_but_not_acknowledged_is_no_fault(run: Path) -> None:
    (run / "receipts" / "1.jsonl").unlink()
    deliveries = audit_deliveries(run)
    assert (deliveries.acknowledged, deliveries.stored, deliveries.sound) == (2, 4, True)


def test_a_line_that_a_kill_left_incomplete_is_ignored(run: Path) -> None:
    with (run / "receipts" / "1.jsonl").open("a") as file:
        file.write('{"slot": 1, "incar')
    assert audit_deliveries(run).acknowledged == 4


def _edit_ack_log(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    """Change the second acknowledgement of slot 1."""

    def damage(run: Path) -> None:
        path = run / "receipts" / "1.jsonl"
        first, second = path.read_text().splitlines()
        row = json.loads(second)
        change(row)
        path.write_text(f"{first}\n{json.dumps(row)}\n")

    return damage


def test_an_acknowledged_episode_that_is_not_stored_is_lost(run: Path) -> None:
    _edit_ack_log(lambda row: row.update(sequence=7))(run)
    deliveries = audit_deliveries(run)
    assert (deliveries.lost, deliveries.sound) == ([AppendKey(1, 0, 7)], False)


def test_an_episode_with_other_bytes_than_those_acknowledged_is_changed(run: Path) -> None:
    _edit_ack_log(lambda row: row.update(sha256="0" * 64))(run)
    deliveries = audit_deliveries(run)
    assert (deliveries.changed, deliveries.sound) == ([AppendKey(1, 0, 1)], False)


def test_duplicates_and_gaps_are_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our writer never makes such a store, so its list of keys is replaced."""
    keys = [AppendKey(0, 0, 0), AppendKey(0, 0, 0), AppendKey(1, 0, 0), AppendKey(1, 0, 3)]
    monkeypatch.setattr("replay.store.store.Store.keys", keys)
    deliveries = audit_deliveries(run)
    assert deliveries.duplicated == [AppendKey(0, 0, 0)]
    assert deliveries.gaps == [AppendKey(1, 0, 1), AppendKey(1, 0, 2)]
    assert not deliveries.sound


# The command


def test_the_command_prints_the_counts_of_a_sound_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = invoke(capsys, monkeypatch, "replay", "audit", run)
    assert done.code == 0
    assert "4 episodes were acknowledged and 4 are stored: 0 lost, 0 duplicated" in done.out


def test_the_command_names_each_fault_and_ends_with_1(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _edit_ack_log(lambda row: row.update(sequence=7))(run)
    done = invoke(capsys, monkeypatch, "replay", "audit", run)
    assert done.code == 1
    assert "lost: slot 1, incarnation 0, 7\n" in done.out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "receipts does not exist: the actors listed nothing"),
        ({"fleet__keep_episodes": 100}, "fleet.keep_episodes = 100"),
    ],
)
def test_a_run_that_cannot_be_audited_is_refused(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = new_run(tmp_path / "run", **changes)
    assert_one_sentence(invoke(capsys, monkeypatch, "replay", "audit", run.path), words)
