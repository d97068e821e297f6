"""The coordinator in a file: what survives, damaged files, clocks, and how addresses are read."""

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from m3pc.coordinator import connect
from m3pc.coordinator.generations import next_generation
from m3pc.coordinator.records import SLOTS, SlotRecord
from m3pc.coordinator.sqlite import SqliteTable, open_database
from m3pc.coordinator.table import Deadline, advance_clock
from m3pc.types import CoordinatorUnavailableError, InputError, RecoveredState
from tests.support.episodes.shared_data import ROOT
from tests.support.servers.coordinators import InFile, pointer

ARTIFACTS = ROOT / "tests" / "artifacts"  # written by earlier versions of m3pc
SECOND = 1 << SlotRecord.bits
DISK = RecoveredState(incarnations={0: 1}, pointers={"weights": pointer(1, 0)})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[InFile]:
    place = InFile(tmp_path)
    yield place
    place.close()


def test_everything_is_there_after_all_processes_ended(place: InFile) -> None:
    client = place.client()
    client.register(0), client.new_epoch("weights"), client.publish("weights", pointer(1, 0))
    client.close()
    again = place.client()
    assert (again.register(0), again.read("weights")) == (2, pointer(1, 0))
    assert len(list(place.generations.iterdir())) == 1


def test_writes_are_synced_to_the_disk_and_the_file_is_for_its_owner(tmp_path: Path) -> None:
    connection = open_database(tmp_path / "a", Deadline(5))
    [[mode]], [[synchronous]] = (
        connection.execute(f"PRAGMA {name}") for name in ("journal_mode", "synchronous")
    )
    connection.close()
    assert (mode, synchronous) == ("wal", 2)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_records_that_only_earlier_versions_know_are_kept_and_ignored(tmp_path: Path) -> None:
    place = InFile(tmp_path)
    place.path.write_bytes((ARTIFACTS / "coordinator_with_lease.sqlite").read_bytes())
    next_generation(place.generations)
    client = place.client()
    assert client.heartbeat(0, 1)
    assert [client.register(0), client.new_epoch("weights")] == [2, 2]
    with closing(sqlite3.connect(place.path)) as database:
        kinds = {kind for (kind,) in database.execute("SELECT kind FROM records")}
    assert "leases" in kinds
    place.close()


@pytest.mark.parametrize("content", [b"not a database" * 100, b"SQLite format 3\0" + bytes(5000)])
def test_a_damaged_file_is_moved_aside_and_rebuilt(content: bytes, place: InFile) -> None:
    place.path.write_bytes(content)
    client = place.client(recover=lambda: DISK)
    assert client.read("weights") == pointer(1, 0)
    assert client.register(0) == SECOND + 1
    assert place.path.with_name("coordinator.sqlite.damaged-1").read_bytes() == content


def test_two_clients_agree_after_the_file_was_damaged_under_them(place: InFile) -> None:
    a, b = place.client(), place.client()
    assert [a.register(0), b.register(0)] == [1, 2]
    place.close()
    place.path.write_bytes(b"noise" * 1000)
    assert [a.register(0), b.register(0), a.register(0)] == [SECOND + 1, SECOND + 2, SECOND + 3]


def test_a_client_that_has_a_removed_file_open_uses_the_new_one(place: InFile) -> None:
    a, b = place.client(), place.client()
    assert [a.register(0), b.register(0)] == [1, 2]
    place.lose()
    assert [a.register(0), b.register(0), a.register(0)] == [SECOND + 1, SECOND + 2, SECOND + 3]


def test_flipped_bits_never_make_a_version_go_back(place: InFile) -> None:
    rng, last = random.Random(0), 1
    for _ in range(200):
        client = place.client(recover=lambda: DISK)
        assert client.read("weights") == pointer(1, 0)
        number = client.register(0)
        assert number > last
        last = number
        client.close()
        content = bytearray(place.path.read_bytes())
        for _ in range(rng.choice((1, 3, 100))):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        place.path.write_bytes(content)


CHANGES = {
    "text": "UPDATE records SET text = replace(text, ':1,', ':0,')",
    "name": "UPDATE records SET name = '7' WHERE kind = 'slots'",
    "kind": "UPDATE records SET kind = 'slot' WHERE kind = 'slots'",
    "marker": "DELETE FROM records WHERE kind = 'marker'",
    "all": "DELETE FROM records",
    "table": "DROP TABLE records",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_record_is_noticed(name: str, place: InFile) -> None:
    place.client().register(0)
    with sqlite3.connect(place.path) as database:
        database.execute(CHANGES[name])
    database.close()
    assert place.client().register(0) == SECOND + 1


def test_a_write_does_not_hide_damage_that_came_just_before_it(
    place: InFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, real = place.client(), SqliteTable.swap
    for slot in (0, 1):
        client.register(slot)

    def swap(*call: Any, **rest: Any) -> bool:
        with sqlite3.connect(place.path) as database:
            database.execute("UPDATE records SET name = '7' WHERE name = '1'")
        database.close()
        monkeypatch.undo()
        return real(*call, **rest)

    monkeypatch.setattr(SqliteTable, "swap", swap)
    client.register(0)
    assert place.client().register(1) == SECOND + 1


def test_the_database_of_another_program_is_refused(place: InFile) -> None:
    with sqlite3.connect(place.path) as database:
        database.execute("CREATE TABLE theirs (a)")
    database.close()
    with pytest.raises(InputError, match="another program"):
        place.client().register(0)
    assert [path.name for path in place.path.parent.glob("*damaged*")] == []


def test_a_file_that_stays_locked_is_a_typed_error(place: InFile) -> None:
    client = place.client(deadline=0.1)
    client.register(0)
    other = sqlite3.connect(place.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CoordinatorUnavailableError, match="locked"):
        client.register(0)
    other.execute("ROLLBACK")
    other.close()
    assert client.register(0) == 2


def test_a_folder_that_was_removed_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    client = connect(tmp_path / "in" / "a", run="a", generations=tmp_path / "g")
    (tmp_path / "in").rmdir()
    with pytest.raises(CoordinatorUnavailableError, match="cannot be opened"):
        client.register(0)


def test_a_clock_that_starts_again_goes_on_from_where_it_was(place: InFile) -> None:
    """The machine was started again."""

    def beat() -> int:
        table = SqliteTable(place.path)
        text = table.snapshot("slots", "0", Deadline(5)).text
        table.close()
        return SLOTS.open("0", text).beat

    client = place.client()
    beats: list[int] = []
    for place.now in (10_000_000, 0, 61_000):
        client.register(0)
        beats.append(beat())
    assert beats == [10_000_000, 10_000_000, 10_061_000]


CLOCKS = {
    "new": ("", 500, (500, "500 0")),
    "later": ("500 0", 700, (700, "700 0")),
    "set back": ("500 0", 20, (500, "500 480")),
    "after it was set back": ("500 480", 30, (510, "510 480")),
    "damaged": ("5oo 0", 20, (20, "20 0")),
    "absurd": ("9" * 400 + " 0", 20, (20, "20 0")),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_time_never_goes_back(name: str) -> None:
    clock, raw, expected = CLOCKS[name]
    assert advance_clock(clock, raw) == expected


# Addresses

REFUSED = {
    "another scheme": ("http://a", r"begins with http://; give redis://"),
    "no host": ("redis:///0", "names host None"),
    "no port": ("redis://a:word", "cannot be read"),
    "no database": ("redis://a/x", "database 'x'"),
    "an option": ("redis://a?ssl=no", "options that are not known"),
    "authorities without encryption": ("redis://a?ca=b", "only rediss:// takes one"),
    "no file": ("sqlite:", "no file"),
    "a folder": (".", "no file"),
    "no folder": ("none/such/a.sqlite", "does not exist; make it first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_address_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    address, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        connect(address, run="a", generations=tmp_path)


def test_a_password_in_a_bad_address_is_not_repeated(tmp_path: Path) -> None:
    for address in ("redis://a:secret@b:word", "http://a:secret@b", "redis://a:secret@b/c"):
        with pytest.raises(InputError) as caught:
            connect(address, run="a", generations=tmp_path)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("run", ["", "a/b", "a}b", "-a", "a" * 101])
def test_a_run_that_cannot_be_part_of_a_key_is_refused(run: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run is"):
        connect(tmp_path / "a", run=run, generations=tmp_path)


def test_all_parts_of_a_url_are_read(tmp_path: Path) -> None:
    client = connect("rediss://a:b%40c@d:1234/5?ca=e", run="run-1", generations=tmp_path)
    assert repr(client) == "TableCoordinator(rediss://a@d:1234/5 m3pc:{run-1})"
    client = connect("redis://d", run="run-1", generations=tmp_path)
    assert repr(client) == "TableCoordinator(redis://d:6390/0 m3pc:{run-1})"
