"""`m3pc replay info, verify, drop` on a store in each state that it can be in."""

import json
import shutil
from collections.abc import Callable
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
from tests.support.runs.commands import Done, assert_one_sentence, invoke, line_with

Replay = Callable[..., Done]
IMPORTED = [f"segments/{i:06d}.{kind}.arrow" for i in (0, 1) for kind in ("steps", "episodes")]
IMPORTED.append("MANIFEST")


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Replay:
    return lambda *arguments: invoke(capsys, monkeypatch, "replay", *arguments)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """At rest: its writer ended in order."""
    return closed(tmp_path / "live")


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    return write_small_store(tmp_path / "imported", np.random.default_rng(1))


def facts(replay: Replay, store: Path | str) -> dict[str, Any]:
    done = replay("info", store, "--json")
    assert done.code == 0, done.errors
    found: dict[str, Any] = json.loads(done.out)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


# info


def test_info_of_a_store_that_is_written(replay: Replay, tmp_path: Path) -> None:
    with fill(tmp_path / "live"):
        found = facts(replay, tmp_path / "live")
    assert found["state"] == "being written"
    assert (found["episodes"], found["steps"], found["segments"]) == (6, 45, [0, 1])
    assert found["policy_versions"] == [7, 14]  # at the first step, at the last
    assert found["producers"] == [
        {"slot": 0, "incarnation": 3, "next": 3},
        {"slot": 1, "incarnation": 3, "next": 4},  # one of its four was refused
    ]
    assert found["refused_episodes"] == 1
    assert found["source"] == {"kind": "test"}
    assert found["bytes"] == sum(map(len, contents(tmp_path / "live").values()))
    assert found["log_bytes"] == (tmp_path / "live/log/000002.log").stat().st_size
    assert found["oldest_segment"] <= found["newest_segment"] <= found["log_changed"]
    assert found["damaged"] == found["torn_bytes"] == {}


def test_info_of_a_store_that_was_closed_and_of_one_that_was_killed(
    replay: Replay, live: Path, tmp_path: Path
) -> None:
    dead = left_by_kill(tmp_path / "dead")
    there = {path: facts(replay, path) for path in (live, dead)}
    assert [found["state"] for found in there.values()] == ["closed in order", "left by a crash"]
    for found in there.values():
        assert (found["episodes"], found["steps"], found["refused_episodes"]) == (6, 45, 1)


def test_info_of_finished_data_sets(replay: Replay, imported: Path) -> None:
    found = facts(replay, imported)
    assert (found["state"], found["episodes"]) == ("finished data set", 4)
    assert (found["log"], found["producers"], found["policy_versions"]) == (None, [], [-1, -1])
    shipped = facts(replay, "shipped:hopper-medium-replay")
    assert (shipped["episodes"], shipped["environment"]) == (409, "d4rl/Hopper-v2")


def test_info_counts_what_a_crash_tore(replay: Replay, tmp_path: Path) -> None:
    dead = left_by_kill(tmp_path / "dead")
    for name in ("MANIFEST", "log/000002.log"):
        with (dead / name).open("ab") as file:
            file.write(b"half a")
    found = facts(replay, dead)
    assert found["torn_bytes"] == {"MANIFEST": 6, "log/000002.log": 6}
    assert (found["episodes"], found["damaged"]) == (6, {})


def test_info_tells_a_closed_mark_of_another_log_from_a_closed_store(
    replay: Replay, live: Path
) -> None:
    mark = (live / "MARK").read_bytes()
    Writer(live, header()).close()  # the log is written anew
    (live / "MARK").write_bytes(mark)
    assert facts(replay, live)["state"] == "left by a crash"


def test_info_of_an_empty_store(replay: Replay, tmp_path: Path) -> None:
    with Writer(tmp_path / "live", header()):
        found = facts(replay, tmp_path / "live")
        assert (found["episodes"], found["policy_versions"]) == (0, None)
        assert replay("info", tmp_path / "live").code == 0


@pytest.mark.parametrize("name", [name for name in FILES if "/" in name])
def test_info_names_what_is_damaged_and_shows_the_rest(
    name: str, replay: Replay, live: Path
) -> None:
    flip(live / name, 60)
    found = facts(replay, live)
    assert list(found["damaged"]) == [name]
    if name.startswith("segments"):
        assert (found["episodes"], found["episodes_in_damaged_segments"]) == (4, 2)
    else:
        assert (found["episodes"], found["episodes_in_damaged_segments"]) == (4, 0)
    assert name in line_with(replay("info", live).out, name + ":")


def test_info_goes_on_without_a_damaged_part_of_a_finished_set(
    replay: Replay, imported: Path
) -> None:
    flip(imported / IMPORTED[0], 60)
    (imported / IMPORTED[1]).unlink()
    found = facts(replay, imported)
    assert list(found["damaged"]) == IMPORTED[:2]
    assert (found["episodes"], found["episodes_in_damaged_segments"]) == (2, 2)


def test_info_and_verify_change_nothing(replay: Replay, tmp_path: Path) -> None:
    dead = left_by_kill(tmp_path / "dead")
    with (dead / "log/000002.log").open("ab") as file:
        file.write(b"half a frame")
    (dead / "segments/000005.steps.arrow.new").touch()
    before = contents(dead)
    replay("info", dead)
    replay("info", dead, "--json")
    replay("verify", dead)
    assert contents(dead) == before


def test_info_for_people_has_the_same_numbers(replay: Replay, tmp_path: Path) -> None:
    with fill(tmp_path / "live") as writer:
        writer.drop([0])
        writer.withdraw(1)
        out = replay("info", tmp_path / "live").out
    assert "being written" in line_with(out, "state  ")
    assert line_with(out, "policy versions").split()[-3:] == ["9", "to", "14"]
    assert "0:3 next 3, 1:3 next 4" in line_with(out, "producers")
    assert line_with(out, "dropped").split()[-2:] == ["1", "(0)"]
    assert "1 (1): 2 episodes" in line_with(out, "withdrawn")
    assert "seconds ago" in line_with(out, "log changed")


def test_many_producers_are_summarised(replay: Replay, tmp_path: Path) -> None:
    with Writer(tmp_path / "live", header()) as writer:
        for slot in range(40):
            writer.append(AppendKey(slot, 0, 0), encode(numbered(slot, 2)))
        out = replay("info", tmp_path / "live").out
        assert len(facts(replay, tmp_path / "live")["producers"]) == 40
    line = line_with(out, "slot:incarnation")
    assert "40 (0:0 next 1," in line
    assert "..., 39:0 next 1)" in line


# verify


def test_verify_of_whole_stores_counts_files_and_bytes(
    replay: Replay, live: Path, imported: Path, tmp_path: Path
) -> None:
    for store, count in ((live, 7), (imported, 5), (left_by_kill(tmp_path / "dead"), 7)):
        size = sum(map(len, contents(store).values()))
        expected = Done(0, f"{count} files, {size:,} bytes: all as written\n", "")
        assert replay("verify", store) == expected
    with fill(tmp_path / "open"):
        assert replay("verify", tmp_path / "open").out.startswith("7 files, ")
    assert replay("verify", "shipped:hopper-medium-replay").code == 0


def places(size: int) -> list[int]:
    drawn = np.random.default_rng(size).integers(0, size, 6)
    return sorted({0, size - 1, *drawn.tolist()})


@pytest.mark.parametrize("name", FILES)
def test_verify_names_the_file_of_a_live_store_that_changed(
    name: str, replay: Replay, live: Path
) -> None:
    assert_flips_are_found(replay, live, name)


@pytest.mark.parametrize("name", IMPORTED)
def test_verify_names_the_file_of_a_data_set_that_changed(
    name: str, replay: Replay, imported: Path
) -> None:
    assert_flips_are_found(replay, imported, name)


def assert_flips_are_found(replay: Replay, store: Path, name: str) -> None:
    good = (store / name).read_bytes()
    for place in places(len(good)):
        flip(store / name, place)
        assert_found(replay, store, name)
        (store / name).write_bytes(good)
    assert replay("verify", store).code == 0


def assert_found(replay: Replay, store: Path, *names: str) -> None:
    """Exit code 1, and a line for each of these files, none for another."""
    done = replay("verify", store)
    assert (done.code, done.errors) == (1, "")
    assert sorted(line.partition(":")[0] for line in done.out.splitlines()) == sorted(names)


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_what_is_missing_or_cut(name: str, replay: Replay, live: Path) -> None:
    (live / name).write_bytes((live / name).read_bytes()[:-1])
    assert_found(replay, live, name)
    (live / name).unlink()
    assert_found(replay, live, name)


def test_verify_finds_what_is_too_much(replay: Replay, live: Path, imported: Path) -> None:
    for store in (live, imported):
        (store / "segments/000009.steps.arrow").touch()
        (store / "notes.txt").touch()
        assert_found(replay, store, "notes.txt", "segments/000009.steps.arrow")


def test_verify_finds_files_that_changed_places(replay: Replay, live: Path) -> None:
    one, other = live / FILES[3], live / FILES[5]
    kept = one.read_bytes()
    shutil.copyfile(other, one)
    other.write_bytes(kept)
    assert_found(replay, live, FILES[3], FILES[5])


def test_verify_names_each_of_several_files(replay: Replay, live: Path) -> None:
    flip(live / "log/000002.log", 60)
    (live / FILES[3]).unlink()
    (live / "MARK.old").touch()
    assert_found(replay, live, "MARK.old", "log/000002.log", FILES[3])


def test_verify_of_what_is_no_store_is_bad_input(replay: Replay, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        for command in ("verify", "info"):
            assert_one_sentence(replay(command, path), f"{path} is not a store")


# drop


def test_drop_of_segments_frees_them_and_keeps_their_numbers_used(
    replay: Replay, live: Path
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


def test_a_drop_from_a_store_that_was_killed_repairs_it_too(replay: Replay, tmp_path: Path) -> None:
    dead = left_by_kill(tmp_path / "dead")
    with (dead / "log/000002.log").open("ab") as file:
        file.write(b"half a frame")
    assert replay("drop", dead, "--segments", "1", "--yes").code == 0
    found = facts(replay, dead)
    assert (found["state"], found["torn_bytes"]) == ("closed in order", {})
    assert [e.seed for e in Store(dead).episodes()] == [100, 101, 104, 105]


@pytest.mark.parametrize(
    ("text", "left"), [("0-1", []), ("0,1", []), (" 1 ", [0]), ("1-99", [0]), ("0-0,1-1", [])]
)
def test_segments_are_named_by_numbers_and_ranges(
    text: str, left: list[int], replay: Replay, live: Path
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
def test_a_drop_that_makes_no_sense_does_nothing(
    options: list[str], words: str, replay: Replay, live: Path
) -> None:
    before = contents(live)
    assert_one_sentence(replay("drop", live, *options, "--yes"), words)
    assert contents(live) == before


@pytest.mark.parametrize(("who", "left"), [("1", [0, 2, 4]), ("1:3", [0, 2, 4]), ("1:2", range(6))])
def test_a_producer_that_is_dropped_is_never_sampled_again(
    who: str, left: list[int], replay: Replay, live: Path
) -> None:
    done = replay("drop", live, "--producer", who, "--yes")
    assert done.code == 0, done.errors
    assert f"{6 - len(left)} episodes will never be sampled again" in done.out
    assert ("sends later" in done.out) == (who == "1")
    withdrawn = Store(live).withdrawn
    assert withdrawn is not None
    assert np.flatnonzero(~withdrawn).tolist() == list(left)
    assert facts(replay, live)["withdrawn_episodes"] == 6 - len(left)


@pytest.mark.parametrize("missing", [True, False])
def test_a_drop_of_damage_goes_on_with_what_is_whole(
    missing: bool, replay: Replay, live: Path
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
    found = list(Store(live).episodes())
    assert all(same(one, numbered(k, 5 + k)) for one, k in zip(found, kept, strict=True))
    now = facts(replay, live)
    assert (now["state"], now["damaged"], len(now["quarantined"])) == ("closed in order", {}, 1)
    aside = ["000000.episodes.arrow"]
    aside += [] if missing else ["000000.steps.arrow", "000002.log"]
    assert now["quarantine_files"] == aside
    assert replay("verify", live).code == 0


def test_where_nothing_is_damaged_nothing_is_dropped(replay: Replay, live: Path) -> None:
    before = contents(live)
    done = replay("drop", live, "--damaged")
    assert (done.code, done.out) == (0, "nothing is damaged: nothing to do\n")
    assert contents(live) == before


def test_nothing_is_dropped_from_a_damaged_manifest(replay: Replay, live: Path) -> None:
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
def test_nothing_is_dropped_from_a_store_that_is_written(
    options: list[str], replay: Replay, tmp_path: Path
) -> None:
    with fill(tmp_path / "live"):
        flip(tmp_path / "live/segments/000001.steps.arrow", 60)
        before = contents(tmp_path / "live")
        done = replay("drop", tmp_path / "live", *options, "--yes")
        assert done.code == 2
        assert "is being written by another process" in done.errors
        assert contents(tmp_path / "live") == before


def test_nothing_is_dropped_from_a_finished_data_set(replay: Replay, imported: Path) -> None:
    before = contents(imported)
    for options in (["--segments", "0"], ["--producer", "0"], ["--damaged"]):
        assert_one_sentence(replay("drop", imported, *options, "--yes"), "finished data set")
    assert contents(imported) == before


def test_nothing_is_dropped_unless_somebody_agrees(
    replay: Replay, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(live)
    done = replay("drop", live, "--segments", "0")  # pytest's standard input is no terminal
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
