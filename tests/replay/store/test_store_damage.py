"""A store that changed in any way since it was written is refused, with the file's name."""

import mmap
import shutil
import zlib
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from m3pc.types import Episode, InputError
from replay.format import manifest
from replay.format.fs import Disk
from replay.format.manifest import AnyEvent, Close, Seal
from replay.store.inspect import inspect_store
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.episodes.foreign_files import write_small_store
from tests.support.episodes.live_store import fill
from tests.support.faults.resealed_store import replace_segment_file, reseal

SEGMENTS = [f"segments/{i:06d}.{kind}.arrow" for i in (0, 1) for kind in ("steps", "episodes")]
MANIFEST = manifest.NAME


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_small_store(tmp_path / "store", np.random.default_rng(1))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Of the same sizes and shapes; only the numbers and the name differ."""
    return write_small_store(tmp_path / "other", np.random.default_rng(2), name="yot")


def refuse(path: Path, *words: str) -> None:
    with pytest.raises(InputError) as refused:
        Store(path)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def contents(path: Path) -> list[tuple[bytes, ...]]:
    def raw(e: Episode) -> tuple[bytes, ...]:
        flags = bytes([e.terminated, e.truncated])
        return e.states.tobytes(), e.actions.tobytes(), e.rewards.tobytes(), flags

    return [raw(episode) for episode in Store(path).episodes()]


def test_the_store_of_these_tests_is_intact_at_first(store: Path, other: Path) -> None:
    files = sorted(str(p.relative_to(store)) for p in store.rglob("*") if p.is_file())
    assert files == sorted([MANIFEST, *SEGMENTS])
    assert Store(store).totals == Close(segments=2, steps=27, episodes=4)
    sizes = [[(p / name).stat().st_size for name in (MANIFEST, *SEGMENTS)] for p in (store, other)]
    assert sizes[0] == sizes[1]
    assert contents(store) != contents(other)


def positions(name: str, size: int) -> list[int]:
    """Every byte of the manifest; of the others the first and last 64, and 300 drawn between."""
    if name == MANIFEST:
        return list(range(size))
    drawn = np.random.default_rng(size).choice(np.arange(64, size - 64), 300, replace=False)
    return [*range(64), *sorted(drawn.tolist()), *range(size - 64, size)]


@pytest.mark.parametrize("name", [MANIFEST, *SEGMENTS])
def test_every_flipped_bit_is_found(name: str, store: Path) -> None:
    before, path = contents(store), store / name
    good = path.read_bytes()
    for position in positions(name, len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        refuse(store, path.name)
    path.write_bytes(good)
    assert contents(store) == before


@pytest.mark.parametrize("name", [MANIFEST, *SEGMENTS])
def test_every_shorter_or_longer_file_is_found(name: str, store: Path) -> None:
    path = store / name
    good = path.read_bytes()
    for length in positions(name, len(good)):
        path.write_bytes(good[:length])
        refuse(store, path.name)
    for more in (b"\0", b"\n", good[-1:], good):
        path.write_bytes(good + more)
        refuse(store, path.name)


@pytest.mark.parametrize("name", [MANIFEST, *SEGMENTS])
def test_a_file_that_is_missing_linked_or_a_folder_is_found(
    name: str, store: Path, tmp_path: Path
) -> None:
    path = store / name
    path.rename(tmp_path / "moved")
    refuse(store, path.name)
    path.symlink_to(tmp_path / "moved")  # the right bytes, but they may change at any time
    refuse(store, path.name)
    path.unlink()
    path.mkdir()
    refuse(store, path.name)


def test_files_that_changed_places_are_found(store: Path, other: Path) -> None:
    for first, second in permutations(SEGMENTS, 2):
        one, two = (store / first).read_bytes(), (store / second).read_bytes()
        (store / first).write_bytes(two)
        (store / second).write_bytes(one)
        refuse(store, "was changed")
        (store / first).write_bytes(one)
        (store / second).write_bytes(two)
    for name in (MANIFEST, *SEGMENTS):
        good = (store / name).read_bytes()
        shutil.copy(other / name, store / name)
        refuse(store, "was changed")
        (store / name).write_bytes(good)
    assert Store(store).totals.episodes == 4


def test_files_that_the_manifest_does_not_list_change_nothing(store: Path, other: Path) -> None:
    before = contents(store)
    shutil.copy(other / SEGMENTS[0], store / "segments" / "000002.steps.arrow")
    (store / "notes.txt").write_text("mine")
    assert contents(store) == before


def test_lines_of_the_manifest_that_moved_are_found(store: Path) -> None:
    path = store / MANIFEST
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    orders = [order for n in range(5) for order in permutations(range(4), n)]
    orders += [(*range(i), i, *range(i, 4)) for i in range(4)]  # each line twice
    for order in orders:
        if order == (0, 1, 2, 3):
            continue
        path.write_bytes(b"".join(lines[i] for i in order))
        refuse(store, MANIFEST)
    for text in (b"".join(lines).replace(b"\n", b"\r\n"), b"".join(lines)[:-1], b"\n" * 4, b" "):
        path.write_bytes(text)
        refuse(store, MANIFEST)


# Below, checksums are made to fit, as a program with a fault or a person could.


def test_a_later_format_is_refused_by_its_number(store: Path) -> None:
    reseal(store, lambda events: events.__setitem__(0, events[0].model_copy(update={"format": 3})))
    refuse(store, "has format 3, this version of m3pc reads 1 and 2")


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"{}",
        b'{"format": true}',
        b'{"format": "1"}',
        b'{"event": "open", "format": 1}',
        b'{"event": "close", "format": 1}',
        b"null",
        b"\xff",
        b"",
        b"[" * 100_000,
        b'{"format": 1, "event": ' + b"[" * 100_000,
        b'{"format": ' + b"9" * 5000 + b"}",
    ],
    ids=range(12),
)
def test_a_first_line_that_is_no_header_is_refused(line: bytes, store: Path) -> None:
    (store / MANIFEST).write_bytes(b"%08x %s\n" % (zlib.crc32(line), line))
    refuse(store, MANIFEST)


def entries(**changes: object) -> Callable[[list[AnyEvent]], None]:
    """Change the entry of the first steps file."""

    def change(events: list[AnyEvent]) -> None:
        seal = events[1]
        assert isinstance(seal, Seal)
        events[1] = seal.model_copy(update={"steps": seal.steps.model_copy(update=changes)})

    return change


def totals(**changes: int) -> Callable[[list[AnyEvent]], None]:
    return lambda events: events.__setitem__(-1, events[-1].model_copy(update=changes))


LIES: dict[str, tuple[Callable[[list[AnyEvent]], object], str]] = {
    "rows": (entries(rows=13), "has 14 rows, the manifest says 13"),
    "no rows": (entries(rows=0), "MANIFEST holds no event"),
    "bytes": (entries(bytes=1), "000000.steps.arrow was changed"),
    "hash": (entries(sha256="0" * 64), "000000.steps.arrow was changed"),
    "no hash": (entries(sha256=""), "MANIFEST holds no event"),
    "a path": (entries(name="../../etc/passwd"), "MANIFEST holds no event"),
    "a path after a name": (entries(name="000000.steps.arrow\n/x"), "MANIFEST holds no event"),
    "another file": (entries(name="000001.steps.arrow"), "000001.steps.arrow was changed"),
    "fewer steps": (totals(steps=26), "holds (2, 27, 4) segments, steps, episodes"),
    "more episodes": (totals(episodes=5), "holds (2, 27, 4) segments, steps, episodes"),
    "a segment less": (lambda events: events.pop(1), "holds (1, 13, 2) segments"),
    "a segment twice": (lambda events: events.insert(1, events[1]), "holds (3, 41, 6) segments"),
    "no segments": (lambda events: events.__delitem__(slice(1, 3)), "is incomplete"),
    "two headers": (lambda events: events.insert(1, events[0]), "is incomplete"),
    "two ends": (lambda events: events.append(events[-1]), "is incomplete"),
    "other sizes": (
        lambda events: events.__setitem__(0, events[0].model_copy(update={"states": 4})),
        "000000.steps.arrow has other columns",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_with_valid_checksums_must_match_the_files_too(name: str, store: Path) -> None:
    change, words = LIES[name]
    reseal(store, change)
    refuse(store, words)


def arrow(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def with_column(batch: pa.RecordBatch, name: str, values: pa.Array) -> list[pa.RecordBatch]:
    columns = [values if n == name else batch[n] for n in batch.schema.names]
    return [pa.record_batch(columns, schema=batch.schema)]


def nulls(batch: pa.RecordBatch, name: str) -> list[pa.RecordBatch]:
    column = batch[name]
    return with_column(batch, name, pa.array([None, *column[1:].to_pylist()], column.type))


def inner_nulls(batch: pa.RecordBatch, name: str) -> list[pa.RecordBatch]:
    rows = [[None, *row[1:]] for row in batch[name].to_pylist()]
    return with_column(batch, name, pa.array(rows, batch[name].type))


def ints(batch: pa.RecordBatch, name: str, *values: int) -> list[pa.RecordBatch]:
    return with_column(batch, name, pa.array(values, batch[name].type))


FITS: dict[str, tuple[str, Callable[[pa.RecordBatch], list[pa.RecordBatch]], str]] = {
    "two batches": ("steps", lambda b: [b[:7], b[7:]], "has other columns"),
    "fewer rows": ("steps", lambda b: [b[:7]], "has 7 rows, the manifest says 14"),
    "a column less": ("steps", lambda b: [b.select(b.schema.names[1:])], "has other columns"),
    "a column renamed": (
        "steps",
        lambda b: [b.rename_columns(["s", *b.schema.names[1:]])],
        "has other columns",
    ),
    "null reward": ("steps", lambda b: nulls(b, "rewards"), "without a value"),
    "null state": ("steps", lambda b: nulls(b, "states"), "without a value"),
    "null number": ("steps", lambda b: inner_nulls(b, "states"), "without a value"),
    "null flag": ("episodes", lambda b: nulls(b, "terminated"), "without a value"),
    "overlap": ("episodes", lambda b: ints(b, "first", 0, 5), "overlap or leave gaps"),
    "gap": ("episodes", lambda b: ints(b, "first", 1, 7), "overlap or leave gaps"),
    "no steps": ("episodes", lambda b: ints(b, "length", 0, 14), "overlap or leave gaps"),
    "negative": ("episodes", lambda b: ints(b, "length", -2, 16), "overlap or leave gaps"),
    "too long": ("episodes", lambda b: ints(b, "length", 6, 9), "has 14 steps, its episodes 15"),
}


@pytest.mark.parametrize("name", FITS)
def test_arrow_files_with_a_matching_hash_are_still_checked(name: str, store: Path) -> None:
    kind, change, words = FITS[name]
    path = store / "segments" / f"000000.{kind}.arrow"
    with pa.ipc.open_file(path.read_bytes()) as reader:
        batch = reader.get_batch(0)
    replace_segment_file(store, path.name, arrow(change(batch)))
    refuse(store, f"000000.{'steps' if name == 'too long' else kind}.arrow", words)


@pytest.mark.parametrize("content", [b"x", b"ARROW1\0\0", b"ARROW1\0\0" * 40, bytes(500)])
def test_a_file_that_is_not_arrow_is_refused_even_if_its_hash_matches(
    content: bytes, store: Path
) -> None:
    replace_segment_file(store, "000000.steps.arrow", content)
    refuse(store, "000000.steps.arrow is not readable as Arrow")


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        refuse(path, "is not a store: it has no MANIFEST")
    (tmp_path / "file").write_text("")
    refuse(tmp_path / "file", "is not a store")


def test_a_manifest_beyond_the_size_limit_is_not_read(store: Path) -> None:
    with (store / MANIFEST).open("r+b") as file:
        file.truncate(manifest.MAX_BYTES + 1)  # a hole: takes no room on disk
    refuse(store, f"is larger than {manifest.MAX_BYTES} bytes")


def test_a_reader_may_skip_damaged_segments(store: Path) -> None:
    path = store / SEGMENTS[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    view = Store(store, skip_damaged=True)
    assert list(view.damaged) == [0]
    assert view.totals == Close(segments=1, steps=13, episodes=2)


class DropsMeanwhile(Disk):
    """A disk on which a writer drops segment 0 just before a reader opens it."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def map(self, path: Path) -> bytes | mmap.mmap:
        segments = [listed.number for listed in self._writer.index.segments]
        if path.parent.name == "segments" and 0 in segments:
            self._writer.drop([0])
        return super().map(path)


def test_a_segment_that_is_dropped_meanwhile_is_not_a_damaged_one(tmp_path: Path) -> None:
    with fill(tmp_path / "live") as writer:
        view = Store(tmp_path / "live", fs=DropsMeanwhile(writer), skip_damaged=True)
        assert (view.damaged, view.totals.episodes) == ({}, 4)
    with fill(tmp_path / "other") as writer:
        seen = inspect_store(tmp_path / "other", fs=DropsMeanwhile(writer))
        assert (seen.damaged, seen.episodes) == ([], 4)


def test_a_damaged_segment_is_forgotten_once_it_is_quarantined(tmp_path: Path) -> None:
    with fill(tmp_path / "live") as writer:
        (tmp_path / "live/segments/000000.steps.arrow").write_bytes(b"no Arrow")
        view = Store(tmp_path / "live", skip_damaged=True)
        assert list(view.damaged) == [0]
        writer.quarantine(0, "no Arrow")
        assert view.latest().damaged == {}
