"""What a live store finds on its disk, and how it makes that good again.

Whatever a crash left, opening again leads to the same store: all that was acknowledged, perhaps
more that was on its way, and nothing torn. What survives is written anew before anything builds on
it: after a failed sync the system may show bytes that its disk does not have.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from m3pc.types import InputError
from replay.format import log as logs
from replay.format import manifest
from replay.format.fs import ASIDE, FS, write_file
from replay.format.index import IndexBuilder, ProducerState, SegmentEntry, StoreIndex
from replay.format.log import Log, LogEntry, Salts
from replay.format.manifest import DamagedError, Header
from replay.format.segment import FOLDER as SEGMENTS
from replay.format.segment import check_bytes
from replay.format.watermark import Watermark
from replay.store.producers import NOBODY, following
from replay.store.tail import read_manifest, read_mark

QUARANTINE = "quarantine"
FOLDERS = (logs.FOLDER, SEGMENTS, QUARANTINE)
OURS = re.compile(r"([0-9]{6})\.(?:steps|episodes)\.arrow")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLog:
    """The open log as it is found."""

    content: bytes
    entries: list[LogEntry]  # up to the first that is not whole
    end: int  # bytes that they take, with the head
    wrong: str  # what no crash explains, if anything
    closed: bool  # its writer ended in order


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredStore:
    """A store as its files say it is; nothing has been changed yet."""

    listing: StoreIndex
    tally: IndexBuilder  # that made it
    manifest: bytes  # its whole lines
    crc: int  # digits of the last one
    entries: list[LogEntry]  # of the open log
    torn_manifest: int  # bytes at its end that a crash left
    torn_log: int  # the same of the open log
    lost: list[SegmentEntry]  # segments whose files are not what was sealed
    damaged_log: bytes | None  # as it was found, where something in it is lost


def find(fs: FS, path: Path, *, accept_loss: bool = False) -> RecoveredStore:
    mark = read_mark(fs, path)
    parsed = read_manifest(fs, path, mark)
    if parsed.events[0].event != "live":
        raise InputError(f"{path} is a finished data set; appending needs a store of a run")
    tally = IndexBuilder(parsed.events, path / manifest.NAME)
    listing = tally.listing()
    opened = read_log(fs, path, listing, mark)
    if opened.wrong and not accept_loss:
        raise DamagedError(path / logs.FOLDER / logs.file_name(listing.rolls), opened.wrong)
    return RecoveredStore(
        listing=listing,
        tally=tally,
        manifest=parsed.whole,
        crc=parsed.crc,
        entries=_salvage(opened.content, listing) if opened.wrong else opened.entries,
        torn_manifest=len(parsed.rest),
        torn_log=0 if opened.wrong else len(opened.content) - opened.end,
        lost=_lost(fs, path, listing, accept_loss),
        damaged_log=opened.content if opened.wrong else None,
    )


def read_log(fs: FS, path: Path, listing: StoreIndex, mark: Watermark | None) -> OpenLog:
    """What the open log holds; the mark was read before it."""
    try:
        content = fs.read(path / logs.FOLDER / logs.file_name(listing.rolls))
    except OSError:
        content = b""
    salt = logs.read_salt(content, listing.rolls, listing.header)
    entries, end = ([], 0) if salt is None else _in_order(content, listing, salt)
    wrong = _wrong(mark, listing, salt, end, len(content))
    closed = mark is not None and mark.closed and (mark.log, mark.salt) == (listing.rolls, salt)
    return OpenLog(content=content, entries=entries, end=end, wrong=wrong, closed=closed)


def _wrong(
    mark: Watermark | None, listing: StoreIndex, salt: bytes | None, end: int, size: int
) -> str:
    """What the open log shows that no crash explains: its frames end at `end` of `size` bytes."""
    if salt is None:
        return "it is missing, or does not begin as this store's open log"
    if mark is None or (mark.log, mark.salt) != (listing.rolls, salt):
        return ""
    if mark.durable > end:
        return f"the frame at byte {end} is not what was written"
    if mark.closed and not (mark.visible == end == size):
        return f"it was closed with {mark.visible} bytes and has {size} now"
    return ""


def _in_order(content: bytes, listing: StoreIndex, salt: bytes) -> tuple[list[LogEntry], int]:
    """Frames up to the first that is torn, or that stands where it cannot have been written."""
    producers, entries, end = dict(listing.producers), [], logs.HEAD.size
    for entry, after in logs.frames(content, end, listing.header, salt):
        if not _is_new(entry, producers):
            break
        entries.append(entry)
        end = after
    return entries, end


def _is_new(entry: LogEntry, producers: dict[int, ProducerState]) -> bool:
    """Whether its sequence number was not used before; it is then."""
    key = entry.key
    if (key.incarnation, key.sequence) < producers.get(key.slot, NOBODY):
        return False
    producers[key.slot] = following(key)
    return True


def _salvage(content: bytes, listing: StoreIndex) -> list[LogEntry]:
    """Every frame that is whole, wherever it stands. The head may be damaged; its salt is tried."""
    salt = content[logs.SALT_AT : logs.SALT_AT + logs.SALT]
    producers, entries, place = dict(listing.producers), [], logs.HEAD.size
    while (place := content.find(logs.FRAME_MAGIC, place)) >= 0:
        found = logs.frame(content, place, listing.header, salt)
        if found is None:
            place += 1
            continue
        entry, place = found
        if _is_new(entry, producers):
            entries.append(entry)
    return entries


def _lost(fs: FS, path: Path, listing: StoreIndex, accept_loss: bool) -> list[SegmentEntry]:
    """Only names and sizes are compared, unless loss is accepted: readers and the scrubber look at
    every byte."""
    folder, lost = path / SEGMENTS, []
    for listed in listing.segments:
        for entry in (listed.steps, listed.episodes):
            try:
                if accept_loss:
                    check_bytes(fs, folder, entry)
                elif len(fs.map(folder / entry.name)) != entry.bytes:
                    raise InputError("its size changed")
            except (InputError, OSError) as error:
                if not accept_loss:
                    what = "it is missing or its size changed, and the manifest lists it"
                    raise DamagedError(folder / entry.name, what) from None
                log.warning("event=segment-lost number=%d error=%s", listed.number, error)
                lost.append(listed)
                break
    return lost


def renew(fs: FS, path: Path, found: RecoveredStore, salts: Salts) -> Log:
    """Write what survived anew and remove what does not count. May be cut short at any point."""
    replace(fs, path / manifest.NAME, found.manifest)
    folder, listing = path / logs.FOLDER, found.listing
    for name in FOLDERS:
        if name not in fs.names(path):
            fs.make_folder(path / name)
    fs.sync_folder(path)
    name = logs.file_name(listing.rolls)
    if found.damaged_log:
        keep(fs, path, name, found.damaged_log)
    fresh = logs.create(fs, folder / (name + ASIDE), listing.rolls, listing.header, salts)
    if found.entries:
        fresh.write(found.entries)
        fresh.sync()
    fs.rename(folder / (name + ASIDE), folder / name)
    fs.sync_folder(folder)
    _tidy(fs, path, listing)
    return fresh


def _tidy(fs: FS, path: Path, listing: StoreIndex) -> None:
    listed = {entry.name for s in listing.segments for entry in (s.steps, s.episodes)}
    spoiled = {event.number for event in listing.quarantined}
    for name in fs.names(path / SEGMENTS):
        if name in listed:
            continue
        number = int(found[1]) if (found := OURS.fullmatch(name)) else -1
        if name.endswith(ASIDE) or number in listing.dropped or number == listing.rolls:
            fs.unlink(path / SEGMENTS / name)
        else:
            if number not in spoiled:
                log.warning("event=file-set-aside name=%s reason=unlisted", name)
            set_aside(fs, path, name)
    for name in fs.names(path / logs.FOLDER):
        if name != logs.file_name(listing.rolls):
            fs.unlink(path / logs.FOLDER / name)
    for name in fs.names(path):
        if name == manifest.NAME + ASIDE:
            fs.unlink(path / name)
    for folder in (SEGMENTS, QUARANTINE, logs.FOLDER):
        fs.sync_folder(path / folder)


def set_aside(fs: FS, path: Path, name: str) -> None:
    """Move a file of a segment to quarantine, under a name that is free there."""
    fs.rename(path / SEGMENTS / name, path / QUARANTINE / _free(fs, path, name))


def keep(fs: FS, path: Path, name: str, content: bytes) -> None:
    """A copy of damaged bytes, for whoever wants to look at them."""
    write_file(fs, path / QUARANTINE / _free(fs, path, name), [content])
    fs.sync_folder(path / QUARANTINE)


def _free(fs: FS, path: Path, name: str) -> str:
    taken = fs.names(path / QUARANTINE)
    return next(
        free for n in range(len(taken) + 1) if (free := f"{name}.{n}" if n else name) not in taken
    )


def replace(fs: FS, path: Path, content: bytes) -> None:
    """Give a file new content; after a crash it has the old or the new one."""
    aside = path.with_name(path.name + ASIDE)
    write_file(fs, aside, [content])
    fs.rename(aside, path)
    fs.sync_folder(path.parent)


def create(fs: FS, path: Path, header: Header, salts: Salts) -> None:
    """An empty live store. It exists from the moment at which its manifest does."""
    strange = _strange(fs, path)
    if strange:
        raise InputError(
            f"{path} holds {', '.join(strange[:3])} and no {manifest.NAME}; give a folder that is "
            "empty or does not exist, or restore the manifest from a copy"
        )
    for name in FOLDERS:
        if name not in fs.names(path):
            fs.make_folder(path / name)
    name = logs.file_name(0)
    logs.create(fs, path / logs.FOLDER / name, 0, header, salts).close()
    fs.sync_folder(path / logs.FOLDER)
    fs.sync_folder(path)
    replace(fs, path / manifest.NAME, manifest.encode([header]))


def _strange(fs: FS, path: Path) -> list[str]:
    """What stands in a folder and was not left by a crash while a store was made there."""
    first, names = logs.file_name(0), set(fs.names(path)) - {*FOLDERS, manifest.NAME + ASIDE}
    for folder in FOLDERS:
        names |= {f"{folder}/{name}" for name in fs.names(path / folder)}
    fresh = f"{logs.FOLDER}/{first}"
    if fresh in names and len(fs.read(path / logs.FOLDER / first)) <= logs.HEAD.size:
        names.remove(fresh)
    return sorted(names)
