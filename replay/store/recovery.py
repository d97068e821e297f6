"""Recovery: a writer reads the files on the disk and makes them consistent again.

After any crash the store holds everything that was acknowledged, perhaps appends that were not
acknowledged yet, and nothing torn. Surviving data are rewritten before they are used: after a
failed sync the system may show bytes that are not on the disk.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from m3pc.types import InputError
from replay.format import log as logs
from replay.format import manifest
from replay.format.fs import FS, TEMPORARY, write_file
from replay.format.index import IndexBuilder, ProducerState, SegmentEntry, StoreIndex
from replay.format.log import Log, LogEntry, Salts
from replay.format.manifest import DamagedError, Header
from replay.format.segment import FOLDER as SEGMENTS
from replay.format.segment import check_bytes
from replay.format.watermark import Watermark
from replay.store.producers import UNKNOWN, state_after
from replay.store.tail import read_manifest, read_mark

QUARANTINE = "quarantine"
FOLDERS = (logs.FOLDER, SEGMENTS, QUARANTINE)
SEGMENT_FILE = re.compile(r"([0-9]{6})\.(?:steps|episodes)\.arrow")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLog:
    """The open log as it is on the disk."""

    content: bytes
    entries: list[LogEntry]  # before the first incomplete frame
    end: int  # offset at which the entries end
    damage: str  # damage that no crash explains; empty if none
    closed: bool  # whether the writer closed the store


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredStore:
    """A store as its files describe it; nothing has been changed yet."""

    index: StoreIndex
    builder: IndexBuilder  # builder of the index
    manifest: bytes  # complete lines
    crc: int  # checksum of the last line
    entries: list[LogEntry]  # in the open log
    torn_manifest: int  # bytes of an incomplete line at the end of the manifest
    torn_log: int  # bytes of an incomplete frame at the end of the open log
    lost: list[SegmentEntry]  # segments with missing or changed files
    damaged_log: bytes | None  # content of the open log if it is damaged


def find(fs: FS, path: Path, *, accept_loss: bool = False) -> RecoveredStore:
    mark = read_mark(fs, path)
    parsed = read_manifest(fs, path, mark)
    if parsed.events[0].event != "live":
        raise InputError(f"{path} is a finished data set; appending needs a store of a run")
    tally = IndexBuilder(parsed.events, path / manifest.NAME)
    index = tally.index()
    opened = read_log(fs, path, index, mark)
    if opened.damage and not accept_loss:
        raise DamagedError(path / logs.FOLDER / logs.file_name(index.rolls), opened.damage)
    return RecoveredStore(
        index=index,
        builder=tally,
        manifest=parsed.complete,
        crc=parsed.crc,
        entries=_salvage(opened.content, index) if opened.damage else opened.entries,
        torn_manifest=len(parsed.rest),
        torn_log=0 if opened.damage else len(opened.content) - opened.end,
        lost=_lost(fs, path, index, accept_loss),
        damaged_log=opened.content if opened.damage else None,
    )


def read_log(fs: FS, path: Path, index: StoreIndex, mark: Watermark | None) -> OpenLog:
    """Read the open log; the mark must be read first."""
    try:
        content = fs.read(path / logs.FOLDER / logs.file_name(index.rolls))
    except OSError:
        content = b""
    salt = logs.read_salt(content, index.rolls, index.header)
    entries, end = ([], 0) if salt is None else _in_order(content, index, salt)
    damage = _damage(mark, index, salt, end, len(content))
    closed = mark is not None and mark.closed and (mark.log, mark.salt) == (index.rolls, salt)
    return OpenLog(content=content, entries=entries, end=end, damage=damage, closed=closed)


def _damage(
    mark: Watermark | None, index: StoreIndex, salt: bytes | None, end: int, size: int
) -> str:
    """Describe damage that no crash explains in a log of `size` bytes with frames up to `end`."""
    if salt is None:
        return "it is missing, or does not begin as this store's open log"
    if mark is None or (mark.log, mark.salt) != (index.rolls, salt):
        return ""
    if mark.durable > end:
        return f"the frame at byte {end} is not what was written"
    if mark.closed and not (mark.visible == end == size):
        return f"it was closed with {mark.visible} bytes and has {size} now"
    return ""


def _in_order(content: bytes, index: StoreIndex, salt: bytes) -> tuple[list[LogEntry], int]:
    """Return the entries before the first torn frame or reused sequence number, and their end."""
    producers, entries, end = dict(index.producers), [], logs.HEAD.size
    for entry, after in logs.frames(content, end, index.header, salt):
        if not _is_new(entry, producers):
            break
        entries.append(entry)
        end = after
    return entries, end


def _is_new(entry: LogEntry, producers: dict[int, ProducerState]) -> bool:
    """Whether the entry's sequence number is unused; marks it as used."""
    key = entry.key
    if (key.incarnation, key.sequence) < producers.get(key.slot, UNKNOWN):
        return False
    producers[key.slot] = state_after(key)
    return True


def _salvage(content: bytes, index: StoreIndex) -> list[LogEntry]:
    """Find every complete frame, wherever it is. Even a damaged head's salt is used."""
    salt = content[logs.SALT_AT : logs.SALT_AT + logs.SALT]
    producers, entries, place = dict(index.producers), [], logs.HEAD.size
    while (place := content.find(logs.FRAME_MAGIC, place)) >= 0:
        entry_end = logs.frame(content, place, index.header, salt)
        if entry_end is None:
            place += 1
            continue
        entry, place = entry_end
        if _is_new(entry, producers):
            entries.append(entry)
    return entries


def _lost(fs: FS, path: Path, index: StoreIndex, accept_loss: bool) -> list[SegmentEntry]:
    """Check every byte and return the damaged segments if loss is accepted. Otherwise compare only
    sizes and raise DamagedError: readers and the scrubber check every byte."""
    folder, lost = path / SEGMENTS, []
    for entry in index.segments:
        for file in (entry.steps, entry.episodes):
            try:
                if accept_loss:
                    check_bytes(fs, folder, file)
                elif len(fs.map(folder / file.name)) != file.bytes:
                    raise InputError("its size changed")
            except (InputError, OSError) as error:
                if not accept_loss:
                    what = "it is missing or its size changed, and the manifest lists it"
                    raise DamagedError(folder / file.name, what) from None
                log.warning("event=segment-lost number=%d error=%s", entry.number, error)
                lost.append(entry)
                break
    return lost


def renew(fs: FS, path: Path, recovered: RecoveredStore, salts: Salts) -> Log:
    """Rewrite surviving data; remove or set aside all other files. May crash at any point."""
    replace(fs, path / manifest.NAME, recovered.manifest)
    folder, index = path / logs.FOLDER, recovered.index
    for name in FOLDERS:
        if name not in fs.names(path):
            fs.make_folder(path / name)
    fs.sync_folder(path)
    name = logs.file_name(index.rolls)
    if recovered.damaged_log:
        keep_copy(fs, path, name, recovered.damaged_log)
    fresh = logs.create(fs, folder / (name + TEMPORARY), index.rolls, index.header, salts)
    if recovered.entries:
        fresh.write(recovered.entries)
        fresh.sync()
    fs.rename(folder / (name + TEMPORARY), folder / name)
    fs.sync_folder(folder)
    _tidy(fs, path, index)
    return fresh


def _tidy(fs: FS, path: Path, index: StoreIndex) -> None:
    listed = {file.name for s in index.segments for file in (s.steps, s.episodes)}
    quarantined = {event.number for event in index.quarantined}
    for name in fs.names(path / SEGMENTS):
        if name in listed:
            continue
        number = int(match[1]) if (match := SEGMENT_FILE.fullmatch(name)) else -1
        if name.endswith(TEMPORARY) or number in index.dropped or number == index.rolls:
            fs.unlink(path / SEGMENTS / name)
        else:
            if number not in quarantined:
                log.warning("event=file-set-aside name=%s reason=unlisted", name)
            set_aside(fs, path, name)
    for name in fs.names(path / logs.FOLDER):
        if name != logs.file_name(index.rolls):
            fs.unlink(path / logs.FOLDER / name)
    for name in fs.names(path):
        if name == manifest.NAME + TEMPORARY:
            fs.unlink(path / name)
    for folder in (SEGMENTS, QUARANTINE, logs.FOLDER):
        fs.sync_folder(path / folder)


def set_aside(fs: FS, path: Path, name: str) -> None:
    """Move a file of a segment to the quarantine folder, under a name that is free there."""
    fs.rename(path / SEGMENTS / name, path / QUARANTINE / _free(fs, path, name))


def keep_copy(fs: FS, path: Path, name: str, content: bytes) -> None:
    """Copy damaged bytes to the quarantine folder, for inspection."""
    write_file(fs, path / QUARANTINE / _free(fs, path, name), [content])
    fs.sync_folder(path / QUARANTINE)


def _free(fs: FS, path: Path, name: str) -> str:
    taken = fs.names(path / QUARANTINE)
    return next(
        free for n in range(len(taken) + 1) if (free := f"{name}.{n}" if n else name) not in taken
    )


def replace(fs: FS, path: Path, content: bytes) -> None:
    """Replace the content of a file atomically."""
    temporary = path.with_name(path.name + TEMPORARY)
    write_file(fs, temporary, [content])
    fs.rename(temporary, path)
    fs.sync_folder(path.parent)


def create(fs: FS, path: Path, header: Header, salts: Salts) -> None:
    """Make an empty live store. It exists once its manifest does."""
    unknown = _unknown_files(fs, path)
    if unknown:
        raise InputError(
            f"{path} holds {', '.join(unknown[:3])} and no {manifest.NAME}; give a folder that is "
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


def _unknown_files(fs: FS, path: Path) -> list[str]:
    """Return the files that an interrupted `create` cannot have left."""
    first, names = logs.file_name(0), set(fs.names(path)) - {*FOLDERS, manifest.NAME + TEMPORARY}
    for folder in FOLDERS:
        names |= {f"{folder}/{name}" for name in fs.names(path / folder)}
    fresh = f"{logs.FOLDER}/{first}"
    if fresh in names and len(fs.read(path / logs.FOLDER / first)) <= logs.HEAD.size:
        names.remove(fresh)
    return sorted(names)
