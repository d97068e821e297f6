"""Names that lead elsewhere: planted links are not followed, ids stay where they belong."""

import contextlib
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3pc.coordinator import connect
from m3pc.coordinator.coordinator import NAME
from m3pc.core.files import durable_file, replace_file, staged_directory
from m3pc.datasets.download import CatalogueEntry, fetch, find_entry, locate
from m3pc.types import AppendKey, InputError
from replay.format.payload import encode
from tests.support.faults.live_writer import episode, open_writer, write_live

PRECIOUS = b"what must not change"
CLOSED = "http://127.0.0.1:9/file.hdf5"  # where nobody listens


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(PRECIOUS)
    return path


# Planted links


def test_a_link_in_a_shared_cache_is_not_written_through(victim: Path, tmp_path: Path) -> None:
    """A part that is longer than its file is cut to nothing: it must be ours."""
    entry = CatalogueEntry(
        id="d4rl:a-v0", url=CLOSED, bytes=5, sha256=hashlib.sha256(b"").hexdigest()
    )
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "d4rl-a-v0.part").symlink_to(victim)
    with pytest.raises(InputError, match="could not be fetched"):
        fetch(entry, folder, lambda progress: None)
    assert victim.read_bytes() == PRECIOUS


def test_a_link_where_a_new_file_is_to_be_is_not_written_through(
    victim: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").symlink_to(victim)
    with pytest.raises(FileExistsError), durable_file(tmp_path / "new") as file:
        file.write(b"other")
    (tmp_path / ".LATEST.new").symlink_to(victim)
    (tmp_path / "LATEST").symlink_to(victim)
    replace_file(tmp_path / "LATEST", b"other")
    assert not (tmp_path / "LATEST").is_symlink()
    assert victim.read_bytes() == PRECIOUS


def test_a_link_where_a_folder_is_to_be_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_bytes(PRECIOUS)
    for name in ("out", ".out.partial"):
        link = tmp_path / name
        link.symlink_to(target)
        with pytest.raises(InputError), staged_directory(tmp_path / "out"):
            raise AssertionError("it was entered")
        link.unlink()
    assert (target / "precious").read_bytes() == PRECIOUS


@pytest.mark.parametrize("kind", ["steps", "log"])
def test_a_link_where_the_next_file_of_a_store_is_to_be_is_not_written_through(
    kind: str, victim: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with open_writer(store) as writer:
        writer.append(AppendKey(0, 0, 0), encode(episode(0)))
        [number] = {int(path.stem) for path in store.glob("log/*.log")}
        if kind == "steps":
            for ending in ("", ".new"):
                place = store / "segments" / f"{number:06d}.steps.arrow{ending}"
                place.parent.mkdir(exist_ok=True)
                place.symlink_to(victim)
        else:
            (store / "log" / f"{number + 1:06d}.log").symlink_to(victim)
        with contextlib.suppress(InputError, OSError):
            writer.roll()
    assert victim.read_bytes() == PRECIOUS


# Ids

paths = st.text(alphabet=st.sampled_from("./\\a:~-0\0\n é"), max_size=12)


@settings(max_examples=300, deadline=None)
@given(rest=paths)
def test_an_id_is_one_of_the_catalogue_or_refused(rest: str) -> None:
    with pytest.raises(InputError, match="there is no dataset"):
        find_entry(f"d4rl:{rest}")


def test_what_is_fetched_stays_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("M3PC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for source in ("d4rl:../../x", "robomimic:../x", "d4rl:/x", "d4rl:~", "d4rl:", "x:../y"):
        with pytest.raises(InputError):
            locate(source, lambda progress: None)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=200, deadline=None)
@given(name=st.one_of(paths, st.text(max_size=80)))
def test_a_run_meets_others_under_a_plain_name_or_not_at_all(name: str) -> None:
    """It becomes part of the names of keys."""
    try:
        client = connect("redis://127.0.0.1:9/0", run=name, generations=Path("/nonexistent"))
    except InputError:
        assert not NAME.fullmatch(name)
    else:
        client.close()
        assert NAME.fullmatch(name)
        assert not set(name) & set("/\\:*{}\n\0 ")


def test_files_that_a_run_makes_are_not_for_others_to_write(tmp_path: Path) -> None:
    """Under the umask that most systems have."""
    before = os.umask(0o022)
    try:
        store = write_live(tmp_path / "store")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o022 for path in store.rglob("*")}
    assert modes == {0}
