"""Checks every byte of a store and names each file that changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from m3pc.types import InputError
from replay.format import log, manifest
from replay.format.fs import FS, Disk
from replay.format.index import SegmentEntry, StoreIndex, index_of
from replay.format.manifest import DamagedError, ParsedManifest
from replay.format.segment import FOLDER as SEGMENTS
from replay.format.segment import check_bytes
from replay.format.watermark import NAME as MARK
from replay.format.watermark import Watermark
from replay.store.recovery import FOLDERS, QUARANTINE, read_log
from replay.store.store import Store
from replay.store.tail import read_manifest, read_mark

ATTEMPTS = 10  # checks of a store that a writer changes meanwhile


@dataclass(frozen=True, slots=True)
class Finding:
    file: Path
    what: str


def verify(path: Path, *, fs: FS | None = None) -> list[Finding]:
    """Return the findings; none if all is well. While a store is being written, unfinished
    entries are no findings."""
    fs = fs or Disk()
    writing = is_written(fs, path)
    for _ in range(ATTEMPTS if writing else 1):
        before = _manifest(fs, path)
        findings = _findings(fs, path, writing)
        if not findings or _manifest(fs, path) == before:
            break  # otherwise a writer interfered: check again
    return findings


def _manifest(fs: FS, path: Path) -> bytes | None:
    try:
        return fs.read(path / manifest.NAME)
    except OSError:
        return None


def _findings(fs: FS, path: Path, writing: bool) -> list[Finding]:
    name = path / manifest.NAME
    mark = read_mark(fs, path)  # read first: all else is at least as new
    try:
        parsed = read_manifest(fs, path, mark)
        index = index_of(parsed.events, name)
    except InputError as error:
        return [Finding(name, str(error))]
    findings = [item for entry in index.segments for item in damaged_files(fs, path, entry)]
    if not writing:
        findings += _end(fs, path, index, parsed, mark) if index.close is None else []
        findings += _unlisted(fs, path, index)
    if not findings:
        try:
            Store(path, fs=fs)
        except InputError as error:
            findings = [Finding(_named(error, path), str(error))]
    return findings


def is_written(fs: FS, path: Path) -> bool:
    """Whether a writer has the store open."""
    try:
        fs.lock(path, shared=True)()
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def damaged_files(fs: FS, path: Path, entry: SegmentEntry) -> Iterator[Finding]:
    """Yield a finding for each file of a segment that is missing or changed."""
    for file in (entry.steps, entry.episodes):
        try:
            check_bytes(fs, path / SEGMENTS, file)
        except InputError as error:
            yield Finding(path / SEGMENTS / file.name, str(error))


def _end(
    fs: FS, path: Path, index: StoreIndex, parsed: ParsedManifest, mark: Watermark | None
) -> Iterator[Finding]:
    """Check the open log and the mark of a store that is not being written."""
    name = path / log.FOLDER / log.file_name(index.rolls)
    opened = read_log(fs, path, index, mark)
    torn = {path / manifest.NAME: len(parsed.rest), name: len(opened.content) - opened.end}
    if opened.damage:
        torn = {}
        yield Finding(name, str(DamagedError(name, opened.damage)))
    for file, count in torn.items():
        if count:
            yield Finding(
                file,
                f"{count} bytes at the end are no complete entry; the next writer cuts them",
            )
    salt = log.read_salt(opened.content, index.rolls, index.header)
    if mark is None:
        yield Finding(path / MARK, "it is missing or was changed; the next writer rewrites it")
    elif not opened.damage and (mark.log, mark.salt) != (index.rolls, salt):
        yield Finding(path / MARK, "it is not of the open log; the next writer rewrites it")


def file_names(index: StoreIndex) -> list[str]:
    """Return the files of a store, relative to its folder."""
    names = [entry.name for s in index.segments for entry in (s.steps, s.episodes)]
    files = [manifest.NAME, *(f"{SEGMENTS}/{name}" for name in names)]
    if index.close is None:
        files += [MARK, f"{log.FOLDER}/{log.file_name(index.rolls)}"]
    return files


def _unlisted(fs: FS, path: Path, index: StoreIndex) -> Iterator[Finding]:
    known = {*file_names(index), SEGMENTS} | ({*FOLDERS} if index.close is None else set())
    present = set(fs.names(path))
    for folder in (SEGMENTS, log.FOLDER):
        present |= {f"{folder}/{name}" for name in fs.names(path / folder)}
    for name in sorted(present - known - {QUARANTINE}):
        yield Finding(path / name, "the manifest does not list it; nothing reads it")


def _named(error: InputError, path: Path) -> Path:
    """Return the file whose path begins the message; the manifest if none does."""
    first = Path(str(error).split(maxsplit=1)[0])
    return first if first.is_relative_to(path) and first != path else path / manifest.NAME
