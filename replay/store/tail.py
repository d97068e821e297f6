"""A live store as other processes see it: its mark, its manifest, the whole frames of its log."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from m3pc.types import InputError
from replay.format import log, manifest
from replay.format.fs import FS
from replay.format.index import ProducerState, StoreIndex, add_up
from replay.format.manifest import DamagedError, Parsed
from replay.format.segment import Segment, in_memory, joined
from replay.format.watermark import NAME, Watermark, decode
from replay.store.producers import following


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    number: int  # of the log
    salt: bytes
    end: int  # bytes of the log that were read
    chunks: tuple[Segment, ...]
    producers: Mapping[int, ProducerState]  # by slot, as they stand after it
    mark: Watermark | None  # as it was then, if it is this log's


def read_mark(fs: FS, path: Path) -> Watermark | None:
    try:
        return decode(fs.read(path / NAME))
    except OSError:
        return None


def read_manifest(fs: FS, path: Path, mark: Watermark | None) -> Parsed:
    """All that the mark, which was read before it, tells of."""
    return checked(manifest.read(fs, path), path, mark)


def read_listing(fs: FS, path: Path) -> StoreIndex:
    """What a store holds now."""
    parsed = read_manifest(fs, path, read_mark(fs, path))
    return add_up(parsed.events, path / manifest.NAME)


def checked(content: bytes, path: Path, mark: Watermark | None) -> Parsed:
    """A manifest in which nothing is missing but, at its end, what a writer was just writing."""
    name = path / manifest.NAME
    parsed = manifest.parse(content, name)
    if parsed.events and parsed.events[0].event == "live":
        if parsed.more or (mark is not None and len(parsed.whole) < mark.manifest):
            raise DamagedError(name, f"line {len(parsed.events) + 1} is not what was written")
    elif parsed.rest:
        raise InputError(
            f"{name} line {len(parsed.events) + 1} was changed or cut: its checksum is wrong; "
            "make or import the data again, or restore it from a copy"
        )
    if not parsed.events:
        raise InputError(f"{name} is empty; make or import the data again")
    return parsed


def read_tail(fs: FS, path: Path, listing: StoreIndex, before: Tail | None) -> Tail:
    """Up to the mark, if it is this log's; after a crash up to the first frame that is torn."""
    name = path / log.FOLDER / log.file_name(listing.rolls)
    mark = read_mark(fs, path)  # first: what it says is in the log that is read next
    try:
        content = memoryview(fs.map(name))
    except OSError:
        raise InputError(f"{name} is missing, but it is the open log of {path}") from None
    salt = log.read_salt(bytes(content[: log.HEAD.size]), listing.rolls, listing.header)
    if salt is None:
        raise InputError(f"{name} was changed: its head is not that of this store's open log")
    if mark is not None and mark.log > listing.rolls:
        raise InputError(f"{name} is not the open log of {path} any more")
    if mark is not None and (mark.log, mark.salt) != (listing.rolls, salt):
        mark = None  # left by a crash, or by a writer that has just begun
    limit = len(content) if mark is None else mark.visible
    if before is None or (before.number, before.salt) != (listing.rolls, salt):
        before = Tail(
            number=listing.rolls,
            salt=salt,
            end=log.HEAD.size,
            chunks=(),
            producers=listing.producers,
            mark=None,
        )
    found = list(log.frames(content[:limit], before.end, listing.header, salt))
    end = found[-1][1] if found else before.end
    if mark is not None and end < mark.durable:
        raise InputError(f"{name} was changed: the frame at byte {end} is damaged")
    fresh = [(entry.episode, entry.key) for entry, _ in found if entry.episode is not None]
    chunks = before.chunks
    if fresh:
        episodes, keys = zip(*fresh, strict=True)
        chunks = _merged((*chunks, in_memory(episodes, keys)))
    return replace(
        before,
        end=end,
        chunks=chunks,
        producers={**before.producers, **{e.key.slot: following(e.key) for e, _ in found}},
        mark=mark,
    )


def _merged(chunks: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """As a counter carries: each chunk at least twice the next, so there are few and an episode is
    copied few times."""
    while len(chunks) > 1 and len(chunks[-2].rewards) < 2 * len(chunks[-1].rewards):
        chunks = (*chunks[:-2], joined(chunks[-2], chunks[-1]))
    return chunks
