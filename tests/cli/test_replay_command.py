"""`m3pc replay info, verify, drop` on a store in each of its states."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from m3pc.types import AckStatus, AppendKey
from replay.format.payload import encode
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.episodes.episodes import header, numbered, same
from tests.support.episodes.foreign_files import write_small_store
from tests.support.episodes.live_store import EPISODES, FILES, closed, fill, left_by_kill
from tests.support.runs.commands import Command, Done, assert_one_sentence, line_with

IMPORTED = [f"segments/{i:06d}.{kind}.arrow" for i in (0, 1) for kind in ("steps", "episodes")]
IMPORTED.append("MANIFEST")


@pytest.fixture
def replay(m3pc: Command) -> Command:
    """m3pc replay"""
    return lambda *arguments: m3pc("replay", *arguments)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A live store whose writer has closed it."""
    return closed(tmp_path / "live")


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    return write_small_store(tmp_path / "imported", np.random.default_rng(1))


def facts(replay: Command, store: Path | str) -> dict[str, Any]:
    done = replay("info", store, "--json")
    assert done.code == 0, done.errors
    info: dict[str, Any] = json.loads(done.out)
    return info


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


# info


def test_info_of_a_store_that_is_written(replay: Command, tmp_path: Path) -> None:
    with fill(tmp_path / "live"):
        info = facts(replay, tmp_path / "live")
    assert info["state"] == "being written"
    assert (info["episodes"], info["steps"], info["segments"]) == (6, 45, [0, 1])
    assert info["policy_versions"] == [7, 14]  # at the first step, at the last
    assert info["producers"] == [
        {"slot": 0, "incarnation": 3, "next": 3},
        {"slot": 1, "incarnation": 3, "next": 4},  # one of its four was refused
    ]
    assert info["refused_episodes"] == 1
    assert info["source"] == {"kind": "test"}
    assert info["bytes"] == sum(map(len, contents(tmp_path / "live").values()))
    assert info["log_bytes"] == (tmp_path / "live/log/000002.log").stat().st_size
    assert info["oldest_segment"] <= info["newest_segment"] <= info["log_changed"]
    assert info["damaged"] == info["torn_bytes"] == {}


def test_info_of_a_store_that_was_closed_and_of_one_that_was_killed(
    replay: Command, live: Path, tmp_path: Path
) -> None:
    dead = left_by_kill(tmp_path / "dead")
    shown = [facts(replay, path) for path in (live, dead)]
    assert [info["state"] for info in shown] == ["closed in order", "left by a crash"]
    for info in shown:
        assert (info["episodes"], info["steps"], info["refused_episodes"]) == (6, 45, 1)


def test_info_of_finished_data_sets(replay: Command, imported: Path) -> None:
    info = facts(replay, imported)
    assert (info["state"], info["episodes"]) == ("finished data set", 4)
    assert (info["log"], info["producers"], info["policy_versions"]) == (None, [], [-1, -1])
    shipped = facts(replay, "shipped:hopper-medium-replay")
    assert (shipped["episodes"], shipped["environment"]) == (409, "d4rl/Hopper-v2")


def test_info_counts_the_bytes_that_a_crash_tore(replay: Command, tmp_path: Path) -> None:
    dead = left_by_kill(tmp_path / "dead")
    for name in ("MANIFEST", "log/000002.log"):
        with (dead / name).open("ab") as file:
            file.write(b"half a")
    info = facts(replay, dead)
    assert info["torn_bytes"] == {"MANIFEST": 6, "log/000002.log": 6}
    assert (info["episodes"], info["damaged"]) == (6, {})


def test_a_closed_mark_of_another_log_does_not_count_as_closed(replay: Command, live: Path) -> None:
    mark = (live / "MARK").read_bytes()
    Writer(live, header()).close()  # the log is written anew
    (live / "MARK").write_bytes(mark)
    assert facts(replay, live)["state"] == "left by a crash"


def test_info_of_an_empty_store(replay: Command, tmp_path: Path) -> None:
    with Writer(tmp_path / "live", header()):
        info = facts(replay, tmp_path / "live")
        assert (info["episodes"], info["policy_versions"]) == (0, None)
        assert replay("info", tmp_path / "live").code == 0


@pytest.mark.parametrize("name", [name for name in FILES if "/" in name])
def test_info_names_damaged_files_and_shows_the_rest(
    name: str, replay: Command, live: Path
) -> None:
    flip(live / name, 60)
    info = facts(replay, live)
    assert list(info["damaged"]) == [name]
    if name.startswith("segments"):
        assert (info["episodes"], info["episodes_in_damaged_segments"]) == (4, 2)
    else:
        assert (info["episodes"], info["episodes_in_damaged_segments"]) == (4, 0)
    assert name in line_with(replay("info", live).out, name + ":")


def test_info_leaves_out_a_damaged_part_of_a_finished_set(replay: Command, imported: Path) -> None:
    flip(imported / IMPORTED[0], 60)
    (imported / IMPORTED[1]).unlink()
    info = facts(replay, imported)
    assert list(info["damaged"]) == IMPORTED[:2]
    assert (info["episodes"], info["episodes_in_damaged_segments"]) == (2, 2)


def test_info_and_verify_change_nothing(replay: Command, tmp_path: Path) -> None:
    dead = left_by_kill(tmp_path / "dead")
    with (dead / "log/000002.log").open("ab") as file:
        file.write(b"half a frame")
    (dead / "segments/000005.steps.arrow.new").touch()
    before = contents(dead)
    replay("info", dead)
    replay("info", dead, "--json")
    replay("verify", dead)
    assert contents(dead) == before


def test_info_for_people_has_the_same_numbers(replay: Command, tmp_path: Path) -> None:
    with fill(tmp_path / "live") as writer:
        writer.drop([0])
        writer.withdraw_producer(1)
        out = replay("info", tmp_path / "live").out
    assert "being written" in line_with(out, "state  ")
    assert line_with(out, "policy versions").split()[-3:] == ["9", "to", "14"]
    assert "0:3 next 3, 1:3 next 4" in line_with(out, "producers")
    assert line_with(out, "dropped").split()[-2:] == ["1", "(0)"]
    assert "1 (1): 2 episodes" in line_with(out, "withdrawn")
    assert "seconds ago" in line_with(out, "log changed")


def test_many_producers_are_summarised(replay: Command, tmp_path: Path) -> None:
    with Writer(tmp_path / "live", header()) as writer:
        for slot in range(40):
            writer.append(AppendKey(slot, 0, 0), encode(numbered(slot, 2)))
        out = replay("info", tmp_path / "live").out
        assert len(facts(replay, tmp_path / "live")["producers"]) == 40
    line = line_with(out, "slot:incarnation")
    assert "40 (0:0 next 1," in line
    assert "..., 39:0 next 1)" in line


# verify


def test_verify_of_undamaged_stores_counts_files_and_bytes(
    replay: Command, live: Path, imported: Path, tmp_path: Path
) -> None:
    for store, count in ((live, 7), (imported, 5), (left_by_kill(tmp_path / "dead"), 7)):
        size = sum(map(len, contents(store).values()))
        expected = Done(0, f"{count} files, {size:,} bytes: all as written\n", "")
        assert replay("verify", store) == expected
    with fill(tmp_path / "open"):
        assert replay("verify", tmp_path / "open").out.startswith("7 files, ")
    assert replay("verify", "shipped:hopper-medium-replay").code == 0


def offsets(size: int) -> list[int]:
    drawn = np.random.default_rng(size).integers(0, size, 6)
    return sorted({0, size - 1, *drawn.tolist()})


@pytest.mark.parametrize("name", FILES)
def test_verify_names_the_file_of_a_live_store_that_changed(
    name: str, replay: Command, live: Path
) -> None:
    assert_flips_are_reported(replay, live, name)


@pytest.mark.parametrize("name", IMPORTED)
def test_verify_names_the_file_of_a_data_set_that_changed(
    name: str, replay: Command, imported: Path
) -> None:
    assert_flips_are_reported(replay, imported, name)


def assert_flips_are_reported(replay: Command, store: Path, name: str) -> None:
    good = (store / name).read_bytes()
    for offset in offsets(len(good)):
        flip(store / name, offset)
        assert_reported(replay, store, name)
        (store / name).write_bytes(good)
    assert replay("verify", store).code == 0


def assert_reported(replay: Command, store: Path, *names: str) -> None:
    """Exit code 1, and a line for each of these files, none for another."""
    done = replay("verify", store)
    assert (done.code, done.errors) == (1, "")
    assert sorted(line.partition(":")[0] for line in done.out.splitlines()) == sorted(names)


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_missing_and_cut_files(name: str, replay: Command, live: Path) -> None:
    (live / name).write_bytes((live / name).read_bytes()[:-1])
    assert_reported(replay, live, name)
    (live / name).unlink()
    assert_reported(replay, live, name)


def test_verify_finds_files_that_do_not_belong(replay: Command, live: Path, imported: Path) -> None:
    for store in (live, imported):
        (store / "segments/000009.steps.arrow").touch()
        (store / "notes.txt").touch()
        assert_reported(replay, store, "notes.txt", "segments/000009.steps.arrow")


def test_verify_finds_files_that_were_swapped(replay: Command, live: Path) -> None:
    first, second = live / FILES[3], live / FILES[5]
    content = first.read_bytes()
    shutil.copyfile(second, first)
    second.write_bytes(content)
    assert_reported(replay, live, FILES[3], FILES[5])


def test_verify_names_each_of_several_files(replay: Command, live: Path) -> None:
    flip(live / "log/000002.log", 60)
    (live / FILES[3]).unlink()
    (live / "MARK.old").touch()
    assert_reported(replay, live, "MARK.old", "log/000002.log", FILES[3])


def test_verify_of_a_folder_that_is_not_a_store_is_bad_input(
    replay: Command, tmp_path: Path
) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        for command in ("verify", "info"):
            assert_one_sentence(replay(command, path), f"{path} is not a store")


# drop


def test_dropped_segments_are_deleted_and_their_episodes_stay_known(
    replay: Command, live: Path
) -> None:
    done = replay("drop", live, "--segments", "0", "--yes")
    assert done.code == 0, done.errors
    assert "segments 0: 2 episodes, 11 steps" in done.out
    assert [e.seed for e in Store(live).episodes()] == [102, 103, 104, 105]
    assert not (live / "segments/000000.steps.arrow").exists()
    assert facts(replay, live)["dropped_segments"] == [0]
    assert replay("verify", live).code == 0
    with Writer(live, header()) as writer:
        first = next(iter(EPISODES))
        assert writer.append(first, encode(EPISODES[first])).status is AckStatus.DUPLICATE


def test_a_drop_from_a_store_that_was_killed_repairs_it_too(
    replay: Command, tmp_path: Path
) -> None:
    dead = left_by_kill(tmp_path / "dead")
    with (dead / "log/000002.log").open("ab") as file:
        file.write(b"half a frame")
    assert replay("drop", dead, "--segments", "1", "--yes").code == 0
    info = facts(replay, dead)
    assert (info["state"], info["torn_bytes"]) == ("closed in order", {})
    assert [e.seed for e in Store(dead).episodes()] == [100, 101, 104, 105]


@pytest.mark.parametrize(
    ("text", "left"), [("0-1", []), ("0,1", []), (" 1 ", [0]), ("1-99", [0]), ("0-0,1-1", [])]
)
def test_segments_are_named_by_numbers_and_ranges(
    text: str, left: list[int], replay: Command, live: Path
) -> None:
    assert replay("drop", live, "--segments", text, "--yes").code == 0
    assert facts(replay, live)["segments"] == left


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--segments", "7"], "has no segment 7; it has 0, 1"),
        (["--segments", "0,5-9"], "has no segment 5-9"),
        (["--segments", "one"], "numbers and ranges"),
        (["--segments", ""], "numbers and ranges"),
        (["--segments", "0-"], "numbers and ranges"),
        (["--producer", "9"], "there are slots 0, 1"),
        (["--producer", "1:4"], "up to incarnation 3, not 4"),
        (["--producer", "x"], "SLOT or SLOT:INCARNATION"),
        ([], "give one of"),
        (["--segments", "0", "--damaged"], "give one of"),
        (["--segments", "0", "--producer", "0"], "give one of"),
    ],
)
def test_a_drop_with_wrong_options_does_nothing(
    options: list[str], words: str, replay: Command, live: Path
) -> None:
    before = contents(live)
    assert_one_sentence(replay("drop", live, *options, "--yes"), words)
    assert contents(live) == before


@pytest.mark.parametrize(
    ("producer", "left"), [("1", [0, 2, 4]), ("1:3", [0, 2, 4]), ("1:2", range(6))]
)
def test_a_dropped_producer_is_never_sampled_again(
    producer: str, left: list[int], replay: Command, live: Path
) -> None:
    done = replay("drop", live, "--producer", producer, "--yes")
    assert done.code == 0, done.errors
    assert f"{6 - len(left)} episodes will never be sampled again" in done.out
    assert ("sends later" in done.out) == (producer == "1")
    withdrawn = Store(live).withdrawn
    assert withdrawn is not None
    assert np.flatnonzero(~withdrawn).tolist() == list(left)
    assert facts(replay, live)["withdrawn_episodes"] == 6 - len(left)


@pytest.mark.parametrize("missing", [True, False])
def test_a_drop_of_damage_keeps_the_undamaged_episodes(
    missing: bool, replay: Command, live: Path
) -> None:
    steps, log = live / "segments/000000.steps.arrow", live / "log/000002.log"
    if missing:
        steps.unlink()
        log.unlink()
    else:
        flip(steps, 60)
        flip(log, 60)  # in the first of its frames
    done = replay("drop", live, "--damaged", "--yes")
    assert done.code == 0, done.errors
    assert "2 episodes of damaged segments" in done.out
    kept = [2, 3] if missing else [2, 3, 5]
    episodes = list(Store(live).episodes())
    assert all(same(e, numbered(k, 5 + k)) for e, k in zip(episodes, kept, strict=True))
    now = facts(replay, live)
    assert (now["state"], now["damaged"], len(now["quarantined"])) == ("closed in order", {}, 1)
    quarantined = ["000000.episodes.arrow"]
    quarantined += [] if missing else ["000000.steps.arrow", "000002.log"]
    assert now["quarantine_files"] == quarantined
    assert replay("verify", live).code == 0


def test_where_nothing_is_damaged_nothing_is_dropped(replay: Command, live: Path) -> None:
    before = contents(live)
    done = replay("drop", live, "--damaged")
    assert (done.code, done.out) == (0, "nothing is damaged: nothing to do\n")
    assert contents(live) == before


def test_nothing_is_dropped_from_a_damaged_manifest(replay: Command, live: Path) -> None:
    lines = (live / "MANIFEST").read_bytes().splitlines(keepends=True)
    for bad in (b"".join([lines[0][:50], *lines[1:]]), b"".join(lines[:-1])):
        (live / "MANIFEST").write_bytes(bad)
        before = contents(live)
        done = replay("drop", live, "--damaged", "--yes")
        assert_one_sentence(done, "MANIFEST")
        assert "--damaged" not in done.errors  # which cannot help
        assert contents(live) == before


@pytest.mark.parametrize(
    "options", [["--segments", "0"], ["--producer", "0"], ["--damaged"]], ids=" ".join
)
def test_nothing_is_dropped_from_a_store_in_use(
    options: list[str], replay: Command, tmp_path: Path
) -> None:
    with fill(tmp_path / "live"):
        flip(tmp_path / "live/segments/000001.steps.arrow", 60)
        before = contents(tmp_path / "live")
        done = replay("drop", tmp_path / "live", *options, "--yes")
        assert done.code == 2
        assert "is being written by another process" in done.errors
        assert contents(tmp_path / "live") == before


def test_nothing_is_dropped_from_a_finished_data_set(replay: Command, imported: Path) -> None:
    before = contents(imported)
    for options in (["--segments", "0"], ["--producer", "0"], ["--damaged"]):
        assert_one_sentence(replay("drop", imported, *options, "--yes"), "finished data set")
    assert contents(imported) == before


def test_nothing_is_dropped_without_confirmation(
    replay: Command, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(live)
    done = replay("drop", live, "--segments", "0")  # pytest's standard input is not a terminal
    assert done.code == 2
    assert "--yes" in done.errors
    assert contents(live) == before
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda text: False)
    done = replay("drop", live, "--segments", "0")
    assert (done.code, done.out.splitlines()[-1]) == (1, "nothing was done")
    assert contents(live) == before
    monkeypatch.setattr(typer, "confirm", lambda text: True)
    assert replay("drop", live, "--segments", "0").code == 0
    assert facts(replay, live)["segments"] == [1]
