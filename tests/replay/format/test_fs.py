"""The seam under the live store: what survives on a simulated disk, and that the real one agrees
wherever nothing is lost."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.format.fs import FS, Disk
from tests.support.faults.sim_fs import Loss, PowerLossError, SimFS, losses

NOTHING = Loss(random.Random(0), names=False, sectors="old")
EVERYTHING = Loss(random.Random(0), names=True, sectors="new")


@pytest.fixture(params=["disk", "simulated"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> FS:
    return Disk() if request.param == "disk" else SimFS(tmp_path)


def saved(fs: SimFS, path: Path, content: bytes) -> None:
    """A file and its name, on the disk."""
    file = fs.create(path)
    file.write([content])
    file.sync()
    fs.sync_folder(path.parent)


# Both


def test_files_grow_at_their_end_and_can_be_overwritten(fs: FS, tmp_path: Path) -> None:
    file = fs.create(tmp_path / "a")
    file.write([b"one", b"two"])
    file.write_at(1, b"N")
    file.write([b"!"])
    file.sync()
    file.close()
    assert fs.read(tmp_path / "a") == b"oNetwo!"
    again = fs.append(tmp_path / "a")
    again.truncate(3)
    again.write([b"more"])
    again.close()
    assert fs.read(tmp_path / "a") == b"oNemore"


def test_many_parts_are_one_write(fs: FS, tmp_path: Path) -> None:
    file = fs.create(tmp_path / "a")
    parts = [b"%d " % number for number in range(3000)]
    file.write([b"", *parts, memoryview(b"end"), b""])
    file.write([])
    file.close()
    assert fs.read(tmp_path / "a") == b"".join(parts) + b"end"


def test_the_system_may_take_fewer_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [b"".join(parts)[:3]]))
    file = Disk().create(tmp_path / "a")
    file.write([b"ab", b"", b"cdefg", b"h"])
    file.close()
    assert Disk().read(tmp_path / "a") == b"abcdefgh"


def test_a_write_beyond_the_end_leaves_zeros(fs: FS, tmp_path: Path) -> None:
    file = fs.create(tmp_path / "a")
    file.write_at(3, b"x")
    file.truncate(6)
    assert fs.read(tmp_path / "a") == b"\0\0\0x\0\0"
    file.close()


def test_files_are_created_renamed_and_removed(fs: FS, tmp_path: Path) -> None:
    fs.make_folder(tmp_path / "in")
    for name in ("b", "a"):
        file = fs.create(tmp_path / name)
        file.write([name.encode()])
        file.close()
    assert fs.names(tmp_path) == ["a", "b", "in"]
    fs.rename(tmp_path / "a", tmp_path / "b")
    fs.rename(tmp_path / "b", tmp_path / "in" / "c")
    fs.sync_folder(tmp_path / "in")
    assert (fs.names(tmp_path), fs.read(tmp_path / "in" / "c")) == (["in"], b"a")
    fs.unlink(tmp_path / "in" / "c")
    assert fs.names(tmp_path / "in") == fs.names(tmp_path / "none") == []
    assert fs.free_bytes(tmp_path) > 0


REFUSALS: dict[str, tuple[type[OSError], Callable[[FS, Path], object]]] = {
    "a taken name": (FileExistsError, lambda fs, path: fs.create(path / "a")),
    "a taken folder name": (FileExistsError, lambda fs, path: fs.make_folder(path / "a")),
    "no file to open": (FileNotFoundError, lambda fs, path: fs.append(path / "x")),
    "no file to read": (FileNotFoundError, lambda fs, path: fs.read(path / "x")),
    "no file to move": (FileNotFoundError, lambda fs, path: fs.rename(path / "x", path / "y")),
    "no file to remove": (FileNotFoundError, lambda fs, path: fs.unlink(path / "x")),
    "no folder for a file": (FileNotFoundError, lambda fs, path: fs.create(path / "x" / "a")),
    "no folder to sync": (FileNotFoundError, lambda fs, path: fs.sync_folder(path / "x")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_impossible_operations_are_errors(name: str, fs: FS, tmp_path: Path) -> None:
    error, do = REFUSALS[name]
    fs.create(tmp_path / "a").close()
    with pytest.raises(error):
        do(fs, tmp_path)
    assert fs.names(tmp_path) == ["a"]


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(target)
    for do in (Disk().create, Disk().append, Disk().read):
        with pytest.raises(OSError):
            do(tmp_path / "link")
    assert target.read_bytes() == b"mine"


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    Disk().create(tmp_path / "a").close()
    assert os.stat(tmp_path / "a").st_mode & 0o777 == 0o600


# Power


def test_what_was_synced_survives_every_loss(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    saved(fs, tmp_path / "a", b"kept" * 300)
    for loss in losses(0, 50):
        assert fs.after(loss).read(tmp_path / "a") == b"kept" * 300


def test_a_name_needs_its_folder_synced(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    file = fs.create(tmp_path / "a")
    file.write([b"x"])
    file.sync()
    assert fs.after(NOTHING).names(tmp_path) == []
    assert fs.after(EVERYTHING).read(tmp_path / "a") == b"x"


def test_bytes_need_their_file_synced(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    fs.create(tmp_path / "a").write([b"x" * 1000])
    fs.sync_folder(tmp_path)
    assert fs.after(NOTHING).read(tmp_path / "a") == b""
    zeros = Loss(random.Random(0), names=True, sectors="zeros")
    assert fs.after(zeros).read(tmp_path / "a") == bytes(1000)


def test_each_sector_has_its_own_fate(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    saved(fs, tmp_path / "a", b"o" * 1536)
    fs.append(tmp_path / "a").write_at(0, b"n" * 1536)
    contents = {fs.after(loss).read(tmp_path / "a") for loss in losses(0, 400)}
    kinds = {
        tuple("?" if len(set(part)) > 1 else chr(part[0]) for part in (x[:512], x[512:1024]))
        for x in contents
    }
    assert kinds == {(a, b) for a in "on\0?" for b in "on\0?"}


def test_a_rename_is_atomic(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    saved(fs, tmp_path / "a", b"new")
    saved(fs, tmp_path / "b", b"old")
    fs.rename(tmp_path / "a", tmp_path / "b")
    outcomes = set()
    for loss in losses(0, 50):
        after = fs.after(loss)
        outcomes.add((tuple(after.names(tmp_path)), after.read(tmp_path / "b")))
    assert outcomes == {(("a", "b"), b"old"), (("b",), b"new")}


def test_changes_of_names_may_survive_in_any_combination(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    for name in "abc":
        fs.create(tmp_path / name)
    names = {"".join(fs.after(loss).names(tmp_path)) for loss in losses(0, 200)}
    assert names == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_a_folder_that_is_lost_loses_its_files(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    fs.make_folder(tmp_path / "in")
    saved(fs, tmp_path / "in" / "a", b"x")
    after = fs.after(NOTHING)
    assert after.names(tmp_path) == after.names(tmp_path / "in") == []


def test_a_truncation_needs_a_sync_too(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    saved(fs, tmp_path / "a", b"abc")
    file = fs.append(tmp_path / "a")
    file.truncate(1)
    assert fs.after(NOTHING).read(tmp_path / "a") == b"abc"
    file.sync()
    assert fs.after(NOTHING).read(tmp_path / "a") == b"a"


# Plans


def test_power_is_lost_before_the_planned_call_and_stays_off(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    fs.stops_at = 1
    file = fs.create(tmp_path / "a")
    for do in (lambda: file.write([b"x"]), file.sync, lambda: fs.names(tmp_path)):
        with pytest.raises(PowerLossError):
            do()
    assert fs.after(EVERYTHING).read(tmp_path / "a") == b""


def test_a_full_disk_takes_part_of_a_write(tmp_path: Path) -> None:
    fs = SimFS(tmp_path)
    fs.fails_at = {1: errno.ENOSPC}
    file = fs.create(tmp_path / "a")
    with pytest.raises(OSError, match="planned"):
        file.write([b"abcd"])
    file.write([b"e"])
    assert fs.read(tmp_path / "a") == b"abe"


def test_a_second_sync_does_not_repair_a_failed_one(tmp_path: Path) -> None:
    """The next one succeeds and saves nothing of what came before: fsync on Linux."""
    fs = SimFS(tmp_path)
    saved(fs, tmp_path / "a", b"old")
    file = fs.append(tmp_path / "a")
    file.write([b"lost"])
    fs.fails_at = {fs.calls: errno.EIO}
    with pytest.raises(OSError, match="planned"):
        file.sync()
    file.sync()
    assert fs.read(tmp_path / "a") == b"oldlost"
    assert fs.after(EVERYTHING).read(tmp_path / "a") == b"old"
