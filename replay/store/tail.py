"""Reads a live store from other processes: watermark, manifest, complete frames of the log."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from m3pc.types import InputError
from replay.format import log, manifest
from replay.format.fs import FS
from replay.format.index import ProducerState, StoreIndex, index_of
from replay.format.manifest import DamagedError, ParsedManifest
from replay.format.segment import Segment, concatenated, segment_of
from replay.format.watermark import NAME, Watermark, decode
from replay.store.producers import state_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    number: int  # number of the open log
    salt: bytes
    end: int  # bytes of the log that were read
    chunks: tuple[Segment, ...]  # the open log's episodes, in memory
    producers: Mapping[int, ProducerState]  # keyed by slot, including the open log
    mark: Watermark | None  # the mark before this read; None if it belongs to another log


def read_mark(fs: FS, path: Path) -> Watermark | None:
    try:
        return decode(fs.read(path / NAME))
    except OSError:
        return None


def read_manifest(fs: FS, path: Path, mark: Watermark | None) -> ParsedManifest:
    """Read the manifest. DamagedError: it ends before the synced size in `mark`, read first."""
    return parse_complete(manifest.read(fs, path), path, mark)


def read_index(fs: FS, path: Path) -> StoreIndex:
    """Return the current index of a store."""
    parsed = read_manifest(fs, path, read_mark(fs, path))
    return index_of(parsed.events, path / manifest.NAME)


def parse_complete(content: bytes, path: Path, mark: Watermark | None) -> ParsedManifest:
    """Parse a manifest, of which only a live store's last line may be incomplete."""
    name = path / manifest.NAME
    parsed = manifest.parse(content, name)
    if parsed.events and parsed.events[0].event == "live":
        if parsed.more or (mark is not None and len(parsed.complete) < mark.manifest):
            raise DamagedError(name, f"line {len(parsed.events) + 1} is not what was written")
    elif parsed.rest:
        raise InputError(
            f"{name} line {len(parsed.events) + 1} was changed or cut: its checksum is wrong; "
            "make or import the data again, or restore it from a copy"
        )
    if not parsed.events:
        raise InputError(f"{name} is empty; make or import the data again")
    return parsed


def read_tail(fs: FS, path: Path, index: StoreIndex, before: Tail | None) -> Tail:
    """Read the open log up to the mark; if that is another log's, up to the first torn frame."""
    name = path / log.FOLDER / log.file_name(index.rolls)
    mark = read_mark(fs, path)  # read first: the log is at least as long
    try:
        content = memoryview(fs.map(name))
    except OSError:
        raise InputError(f"{name} is missing, but it is the open log of {path}") from None
    salt = log.read_salt(bytes(content[: log.HEAD.size]), index.rolls, index.header)
    if salt is None:
        raise InputError(f"{name} was changed: its head is not that of this store's open log")
    if mark is not None and mark.log > index.rolls:
        raise InputError(f"{name} is not the open log of {path} any more")
    if mark is not None and (mark.log, mark.salt) != (index.rolls, salt):
        mark = None  # left by a crash, or by a writer that has just started
    limit = len(content) if mark is None else mark.visible
    if before is None or (before.number, before.salt) != (index.rolls, salt):
        before = Tail(
            number=index.rolls,
            salt=salt,
            end=log.HEAD.size,
            chunks=(),
            producers=index.producers,
            mark=None,
        )
    entries = list(log.frames(content[:limit], before.end, index.header, salt))
    end = entries[-1][1] if entries else before.end
    if mark is not None and end < mark.durable:
        raise InputError(f"{name} was changed: the frame at byte {end} is damaged")
    fresh = [(entry.episode, entry.key) for entry, _ in entries if entry.episode is not None]
    chunks = before.chunks
    if fresh:
        episodes, keys = zip(*fresh, strict=True)
        chunks = _merged((*chunks, segment_of(episodes, keys)))
    return replace(
        before,
        end=end,
        chunks=chunks,
        producers={**before.producers, **{e.key.slot: state_after(e.key) for e, _ in entries}},
        mark=mark,
    )


def _merged(chunks: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Merge the last chunks until each has at least twice the steps of the next, so that there are
    few chunks and an episode is copied few times."""
    while len(chunks) > 1 and len(chunks[-2].rewards) < 2 * len(chunks[-1].rewards):
        chunks = (*chunks[:-2], concatenated(chunks[-2], chunks[-1]))
    return chunks
