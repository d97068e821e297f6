"""Bytes that changed on the disk of a live store are found, named and never used as data."""

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from m3pc.types import InputError
from replay.format import log, manifest, watermark
from replay.store.store import Store
from replay.store.verify import verify
from tests.support.episodes.episodes import same
from tests.support.faults.fuzz_runner import mutate
from tests.support.faults.live_writer import HEADER, open_writer, write_live
from tests.support.faults.sim_fs import Loss, SimFS

PATH = Path("/disk/store")
FRAME = log.FRAMES[HEADER.format]
FILES = {
    "manifest": PATH / manifest.NAME,
    "mark": PATH / watermark.NAME,
    "log": PATH / log.FOLDER / log.file_name(3),
    "steps": PATH / "segments" / "000001.steps.arrow",
    "episodes": PATH / "segments" / "000002.episodes.arrow",
}


@pytest.fixture(scope="module", params=["closed", "killed"])
def disk(request: pytest.FixtureRequest) -> SimFS:
    """A live store at rest, whose writer ended in order or not: each kind of test runs on both."""
    fs = SimFS(PATH.parent)
    write_live(PATH, fs=fs, close=request.param == "closed")
    assert verify(PATH, fs=fs) == []
    return fs


def copy(fs: SimFS) -> SimFS:
    return fs.after(Loss(random.Random(0), names=True, sectors="new"))


def changed(fs: SimFS, path: Path, content: bytes) -> SimFS:
    changed_fs = copy(fs)
    file = changed_fs.append(path)
    file.truncate(0)
    file.write([content])
    return changed_fs


def flips(content: bytes, count: int) -> Iterator[bytes]:
    """The content with one bit flipped: for every bit, or for `count` random ones."""
    rng = random.Random(len(content))
    bits = range(8 * len(content))
    for bit in rng.sample(bits, count) if len(bits) > count else rng.choices(bits, k=count):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def assert_noticed(fs: SimFS, disk: SimFS, name: Path) -> None:
    """`verify` names the file; a reader and a writer refuse, or give what was written."""
    assert name in {finding.file for finding in verify(PATH, fs=fs)}
    assert_refused_or_the_same(fs, disk)
    try:
        open_writer(PATH, fs=fs)
    except InputError:
        return
    assert_refused_or_the_same(fs, disk)


def assert_refused_or_the_same(fs: SimFS, disk: SimFS) -> None:
    try:
        read = Store(PATH, fs=fs)
    except InputError:
        return
    written = Store(PATH, fs=disk)
    assert read.totals == written.totals
    assert all(map(same, read.episodes(), written.episodes()))
    assert read.producers == written.producers
    assert read.withdrawn is not None and written.withdrawn is not None
    assert np.array_equal(read.withdrawn, written.withdrawn)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", FILES)
def test_every_flipped_bit_is_found_and_its_file_named(kind: str, count: int, disk: SimFS) -> None:
    path, caught = FILES[kind], 0
    for content in flips(disk.read(path), count):
        assert_noticed(changed(disk, path, content), disk, path)
        caught += 1
    assert caught == count


@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", FILES)
def test_no_mutant_passes_for_the_file(kind: str, count: int, disk: SimFS) -> None:
    path, good = FILES[kind], disk.read(FILES[kind])
    for number in range(count):
        mutant = mutate(good, np.random.default_rng([5, number]))
        assert_noticed(changed(disk, path, mutant), disk, path)


@pytest.mark.parametrize("kind", ["log", "manifest"])
def test_bytes_that_a_crash_left_at_the_end_are_named_and_removed_by_a_writer(kind: str) -> None:
    fs = SimFS(PATH.parent)
    write_live(PATH, fs=fs, close=False)
    good = fs.read(FILES[kind])
    torn = changed(fs, FILES[kind], good + b"half a")
    (finding,) = verify(PATH, fs=torn)
    assert (finding.file, finding.what[:7]) == (FILES[kind], "6 bytes")
    open_writer(PATH, fs=torn).close()
    assert verify(PATH, fs=torn) == []
    assert_refused_or_the_same(torn, fs)


def fixed_log(content: bytes, salt: bytes) -> bytes:
    """The same content with valid checksums wherever there is a frame."""
    fixed, place = bytearray(content), log.HEAD.size
    while (place := bytes(fixed).find(log.FRAME_MAGIC, place)) >= 0:
        if place + FRAME.size > len(fixed):
            break
        fields = FRAME.unpack_from(fixed, place)
        ended, steps = fields[3], min(fields[9], HEADER.max_episode_steps)
        end = place + FRAME.size + (0 if ended == log.SKIPPED else log.numbers_size(HEADER, steps))
        parts = [fixed[place + 8 : place + FRAME.size], fixed[place + FRAME.size : end]]
        fixed[place + 4 : place + 8] = log.checksum([bytes(part) for part in parts], salt)
        place += FRAME.size
    return bytes(fixed)


def fixed_manifest(content: bytes) -> bytes:
    crc, lines = 0, b""
    for line in content.splitlines():
        crc = zlib.crc32(line[9:], crc)
        lines += b"%08x %s\n" % (crc, line[9:])
    return lines


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["log", "manifest"])
def test_false_content_with_valid_checksums_is_refused_or_consistent(
    kind: str, count: int, disk: SimFS
) -> None:
    """As a program with a fault or a person could write them: no crash, no hang, no shape that is
    wrong; an InputError is the only refusal, for a reader, `verify` and a writer."""
    path, good = FILES[kind], disk.read(FILES[kind])
    header = HEADER.model_copy(update={"event": "live"})
    salt = log.read_salt(disk.read(FILES["log"]), 3, header)
    assert salt is not None
    refused = 0
    for number in range(count):
        mutant = mutate(good, np.random.default_rng([6, number]))
        fits = fixed_log(mutant, salt) if kind == "log" else fixed_manifest(mutant)
        fs = changed(disk, path, fits)
        verify(PATH, fs=fs)
        try:
            for episode in Store(PATH, fs=copy(fs)).episodes():
                assert len(episode.states) == len(episode.actions) + 1 == len(episode) + 1
                assert np.isfinite(episode.states).all()
            open_writer(PATH, fs=fs).close()
        except InputError:
            refused += 1
    assert refused > count // 10
