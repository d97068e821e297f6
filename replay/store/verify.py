"""Is every byte of a store what was written? Names each file that is not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from m3pc.types import InputError
from replay.format import log, manifest
from replay.format.fs import FS, Disk
from replay.format.index import SegmentEntry, StoreIndex, add_up
from replay.format.manifest import DamagedError, Parsed
from replay.format.segment import FOLDER as SEGMENTS
from replay.format.segment import check_bytes
from replay.format.watermark import NAME as MARK
from replay.format.watermark import Watermark
from replay.store.recovery import FOLDERS, QUARANTINE, read_log
from replay.store.store import Store
from replay.store.tail import read_manifest, read_mark

ATTEMPTS = 10  # while a writer changes the store


@dataclass(frozen=True, slots=True)
class Finding:
    file: Path
    what: str


def verify(path: Path, *, fs: FS | None = None) -> list[Finding]:
    """Findings, none where all is well. A store may be verified while it is written: what its
    writer has just begun is no finding then."""
    fs = fs or Disk()
    writing = is_written(fs, path)
    for _ in range(ATTEMPTS if writing else 1):
        before = _content(fs, path)
        found = _findings(fs, path, writing)
        if not found or _content(fs, path) == before:
            break  # otherwise the writer was faster
    return found


def _content(fs: FS, path: Path) -> bytes | None:
    try:
        return fs.read(path / manifest.NAME)
    except OSError:
        return None


def _findings(fs: FS, path: Path, writing: bool) -> list[Finding]:
    name = path / manifest.NAME
    mark = read_mark(fs, path)  # first: what it tells is in what is read next
    try:
        parsed = read_manifest(fs, path, mark)
        listing = add_up(parsed.events, name)
    except InputError as error:
        return [Finding(name, str(error))]
    found = [finding for listed in listing.segments for finding in damage(fs, path, listed)]
    if not writing:
        found += _end(fs, path, listing, parsed, mark) if listing.close is None else []
        found += _strangers(fs, path, listing)
    if not found:
        try:
            Store(path, fs=fs)
        except InputError as error:
            found = [Finding(_named(error, path), str(error))]
    return found


def is_written(fs: FS, path: Path) -> bool:
    """Whether a writer has the store open."""
    try:
        fs.lock(path, shared=True)()
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def damage(fs: FS, path: Path, listed: SegmentEntry) -> Iterator[Finding]:
    """Which of a segment's files are not what was sealed."""
    for entry in (listed.steps, listed.episodes):
        try:
            check_bytes(fs, path / SEGMENTS, entry)
        except InputError as error:
            yield Finding(path / SEGMENTS / entry.name, str(error))


def _end(
    fs: FS, path: Path, listing: StoreIndex, parsed: Parsed, mark: Watermark | None
) -> Iterator[Finding]:
    """The open log and the mark of a store that nobody writes."""
    name = path / log.FOLDER / log.file_name(listing.rolls)
    opened = read_log(fs, path, listing, mark)
    torn = {path / manifest.NAME: len(parsed.rest), name: len(opened.content) - opened.end}
    if opened.wrong:
        torn = {}
        yield Finding(name, str(DamagedError(name, opened.wrong)))
    for file, count in torn.items():
        if count:
            yield Finding(
                file, f"{count} bytes at the end are no whole entry; the next writer removes them"
            )
    salt = log.read_salt(opened.content, listing.rolls, listing.header)
    if mark is None:
        yield Finding(path / MARK, "it is missing or was changed; the next writer makes it anew")
    elif not opened.wrong and (mark.log, mark.salt) != (listing.rolls, salt):
        yield Finding(path / MARK, "it is not of the open log; the next writer makes it anew")


def files(listing: StoreIndex) -> list[str]:
    """What a store is made of, by name in its folder."""
    names = [entry.name for s in listing.segments for entry in (s.steps, s.episodes)]
    found = [manifest.NAME, *(f"{SEGMENTS}/{name}" for name in names)]
    if listing.close is None:
        found += [MARK, f"{log.FOLDER}/{log.file_name(listing.rolls)}"]
    return found


def _strangers(fs: FS, path: Path, listing: StoreIndex) -> Iterator[Finding]:
    known = {*files(listing), SEGMENTS} | ({*FOLDERS} if listing.close is None else set())
    there = set(fs.names(path))
    for folder in (SEGMENTS, log.FOLDER):
        there |= {f"{folder}/{name}" for name in fs.names(path / folder)}
    for name in sorted(there - known - {QUARANTINE}):
        yield Finding(path / name, "the manifest does not list it; nothing reads it")


def _named(error: InputError, path: Path) -> Path:
    """The file that a message begins with."""
    first = Path(str(error).split(maxsplit=1)[0])
    return first if first.is_relative_to(path) and first != path else path / manifest.NAME
