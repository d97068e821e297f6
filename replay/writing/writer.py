"""Appends to a live store, from one process at a time. The order on the disk (-> before):

commit  judge the requests, write the frames of new episodes, sync, acknowledge
roll    segment files, synced -> their names, synced -> the next log, synced -> a line in the
        manifest, synced -> the old log may be removed
drop    a line in the manifest, synced -> the files may be removed
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from m3pc.types import Ack, AckStatus, AppendKey, Durability, Episode, InputError
from replay.format import log as logs
from replay.format import manifest
from replay.format.fs import FS, Disk, File
from replay.format.index import ProducerState, StoredTotals, StoreIndex
from replay.format.log import Log, LogEntry, Salts
from replay.format.manifest import AnyEvent, Drop, Header, Quarantine, Roll, Withdraw
from replay.format.payload import PayloadError, decode
from replay.format.schema import FORMAT
from replay.format.segment import FOLDER as SEGMENTS
from replay.format.segment import write_segment
from replay.format.watermark import NAME as MARK
from replay.format.watermark import Watermark
from replay.store import recovery
from replay.store.producers import Producers, state_after
from replay.writing.manifest_writer import BrokenStoreError, ManifestWriter
from replay.writing.quarantine import find_damage, move_files
from replay.writing.retention import RetentionLimits

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors that pass when there is room again

LOCK_PAUSES: Final = (0.01, 0.05, 0.2, 0.2, 0.0)  # seconds between attempts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions(RetentionLimits):
    durability: Durability = "fsync"
    segment_bytes: int = 64 << 20  # a log of this size becomes a segment
    max_refused: int = 100  # an incarnation with so many invalid episodes is fenced


class AppendRequest(NamedTuple):
    key: AppendKey
    content: Episode | PayloadError  # the decoded payload, or why it is invalid


class Writer:
    """An EpisodeSink on a disk, for one thread. `GroupCommitter` serves many."""

    def __init__(
        self,
        path: Path | str,
        header: Header,
        options: WriterOptions | None = None,
        *,
        fs: FS | None = None,
        salts: Salts = os.urandom,
        accept_loss: bool = False,
    ) -> None:
        """Create the store, or recover it with everything that was acknowledged.

        accept_loss  open even if acknowledged bytes are lost; damaged files are set aside
        """
        self.path, self.options = Path(path), options or WriterOptions()
        self._fs, self._salts = fs or Disk(), salts
        self._broken: str | None = None
        header = header.model_copy(update={"event": "live", "format": FORMAT})
        self._unlock = _lock_folder(self._fs, self.path)
        try:
            self._recover(header, accept_loss)
        except BaseException:
            self._unlock()
            raise

    def _recover(self, header: Header, accept_loss: bool) -> None:
        fs, path = self._fs, self.path
        if manifest.NAME not in fs.names(path):
            recovery.create(fs, path, header, self._salts)
        recovered = recovery.find(fs, path, accept_loss=accept_loss)
        index = recovered.index
        if index.header.format != FORMAT:
            raise InputError(
                f"{path} has format {index.header.format}, of an older version of m3pc: it can be "
                f"read and exported, but not changed; this version writes format {FORMAT}; give "
                "another folder"
            )
        if index.header != header:
            raise InputError(
                f"{path} was made for {index.header.model_dump_json()}, not for "
                f"{header.model_dump_json()}; give another folder or the same settings"
            )
        self._log: Log = recovery.renew(fs, path, recovered, self._salts)
        self._durable = self._log.end
        self._manifest = ManifestWriter(
            fs, path, recovered.builder, len(recovered.manifest), recovered.crc
        )
        self.open_entries: list[LogEntry] = recovered.entries  # all entries of the open log
        self.producers = Producers(index.producers, self.options.max_refused)
        self.producers.advance(recovered.entries)
        self.totals = index.totals.plus(_totals(recovered.entries))
        self._mark: File = _open_mark(fs, path)
        self._write_mark()
        for entry in recovered.lost:
            self.quarantine(entry.number, "damaged or missing when the store was opened")
        self.torn_bytes = recovered.torn_manifest + recovered.torn_log  # left by a crash
        log.info(
            "event=store-opened path=%s segments=%d frames=%d torn_bytes=%d lost_segments=%d",
            path,
            len(self.index.segments),
            len(recovered.entries),
            self.torn_bytes,
            len(recovered.lost),
        )

    @property
    def header(self) -> Header:
        return self.index.header

    @property
    def index(self) -> StoreIndex:
        return self._manifest.index

    @property
    def size(self) -> int:
        """Bytes of the segments and the open log."""
        return sum(entry.bytes for entry in self.index.segments) + self._log.end

    @property
    def steps(self) -> int:
        """Steps that are in the store now."""
        return self.totals.steps - self.index.removed_steps

    # Appending

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        return self.commit([self.request(key, payload)])[0]

    def request(self, key: AppendKey, payload: bytes) -> AppendRequest:
        """Check and decode the payload, the costly part of an append. Any thread may call it."""
        try:
            return AppendRequest(key, decode(payload, self.header))
        except PayloadError as error:
            return AppendRequest(key, error)

    def commit(self, requests: Sequence[AppendRequest]) -> list[Ack]:
        """Return one reply for each request; new episodes are synced together."""
        self.require_working()
        problem = self._make_room()
        if not problem:
            acks, entries = self._judge(requests)
            problem = self._save(entries) if entries else ""
        if problem:
            return [self.retry_later(request.key, problem) for request in requests]
        if entries:
            self.producers.advance(entries)
            self.open_entries += entries
            self.totals = self.totals.plus(_totals(entries))
            self._write_mark()
            if self._log.end >= self.options.segment_bytes:
                with self._postponing("event=roll-postponed log=%d error=%s", self._log.number):
                    self._roll()
        return acks

    def reply_without_payload(self, key: AppendKey) -> Ack | None:
        """Return the reply to a key that is not its producer's next, None for the next key. Writes
        nothing; any thread may call."""
        self.require_working()
        refusal, expected, reason = self.producers.judge(key, {})
        return None if refusal is None else self._ack(refusal, expected, reason)

    def retry_later(self, key: AppendKey, reason: str) -> Ack:
        return self._ack(AckStatus.RETRY_LATER, self.producers.expected(key), reason)

    def _judge(self, requests: Sequence[AppendRequest]) -> tuple[list[Ack], list[LogEntry]]:
        """Return the replies, to be sent once the new entries are saved, and these entries."""
        ahead: dict[int, ProducerState] = {}
        acks, entries = [], []
        for key, content in requests:
            refusal, expected, reason = self.producers.judge(key, ahead)
            if refusal is None:
                ahead[key.slot] = state_after(key)
                if isinstance(content, PayloadError):
                    refusal, reason = AckStatus.REJECTED, str(content)
                    entries.append(LogEntry(key, None, content.code))
                else:
                    entries.append(LogEntry(key, content))
            acks.append(self._ack(refusal or AckStatus.DURABLE, expected, reason))
        return acks, entries

    def _save(self, entries: list[LogEntry]) -> str:
        """Make the entries as durable as the options say; return why there is no room, if so."""
        try:
            self._retry_once(lambda: self._write_and_sync(entries), "event=sync-failed")
        except OSError as error:
            self.require_working()
            return str(error)
        return ""

    def _write_and_sync(self, entries: list[LogEntry]) -> None:
        """After a failed sync the end of the log is unknown. All acknowledged entries, still in
        memory, then become a segment, and new entries go to the next log."""
        if self._log.doubtful:
            self._roll()
        try:
            self._log.write(entries)
            if self.options.durability == "fsync":
                self._log.sync()
                self._durable = self._log.end
        except OSError as error:
            self._log.doubtful |= error.errno not in FULL
            raise

    # Segments

    def roll(self) -> None:
        """Make a segment of the open log now."""
        self.require_working()
        if self.open_entries:
            self._roll()

    def _roll(self) -> None:
        self._retry_once(self._roll_once, "event=roll-failed")

    def _roll_once(self) -> None:
        """Roll once; each attempt writes every file from the beginning."""
        number, folder = self._log.number, self.path / logs.FOLDER
        kept = [(e.key, e.episode) for e in self.open_entries if e.episode is not None]
        steps, episodes = (
            write_segment(self._fs, self.path, number, kept, self.index) if kept else (None, None)
        )
        name = folder / logs.file_name(number + 1)
        next_log = logs.create(self._fs, name, number + 1, self.header, self._salts)
        slots = sorted({entry.key.slot for entry in self.open_entries})
        totals = _totals(self.open_entries)
        try:
            self._fs.sync_folder(folder)
            self._record(
                Roll(
                    number=number,
                    steps=steps,
                    episodes=episodes,
                    refused=len(self.open_entries) - len(kept),
                    terminated=totals.terminated,
                    truncated=totals.truncated,
                    producers=[(slot, *self.producers[slot]) for slot in slots],
                )
            )
        except OSError:
            next_log.close()
            raise
        self._log.close()
        self._log, self._durable, self.open_entries = next_log, next_log.end, []
        self._write_mark()
        self._remove([folder / logs.file_name(number)])
        self._drop_when_possible(self.options.beyond_limits(self.index.segments))

    def _make_room(self) -> str:
        """Drop the oldest segment if space is low; return why nothing can be appended, if so."""
        free = self._fs.free_bytes(self.path)
        self._drop_when_possible(self.options.to_make_room(self.index.segments, free))
        return "the disk is almost full" if free < self.options.no_space else ""

    def _drop_when_possible(self, numbers: Sequence[int]) -> None:
        """Drop segments. If the manifest has no room for the line, a later call drops them."""
        if numbers:
            with self._postponing("event=retention-postponed segments=%s error=%s", numbers):
                self.drop(numbers, "retention")

    def drop(
        self, numbers: Sequence[int], reason: Literal["retention", "operator"] = "operator"
    ) -> None:
        """Remove segments. Their producers' sequence numbers stay used."""
        self.require_working()
        known = {entry.number: entry for entry in self.index.segments}
        unknown = sorted(set(numbers) - known.keys())
        if unknown:
            raise InputError(
                f"{self.path} has no segments {unknown}; it has {sorted(known)[:20]}; "
                "`m3pc replay info` lists them"
            )
        self._record(Drop(numbers=list(numbers), reason=reason))
        files = [entry for n in numbers for entry in (known[n].steps, known[n].episodes)]
        self._remove([self.path / SEGMENTS / entry.name for entry in files])

    def withdraw_producer(self, slot: int, incarnation: int | None = None) -> None:
        """Exclude a producer's episodes from sampling. None: all incarnations, later ones too."""
        self.require_working()
        self._record(Withdraw(slot=slot, incarnation=incarnation))

    def quarantine(self, number: int, reason: str) -> None:
        """Take a damaged segment out of the store; its files are kept in quarantine."""
        self.require_working()
        (entry,) = [s for s in self.index.segments if s.number == number]
        self._record(Quarantine(number=number, reason=reason[:500]))
        log.error("event=segment-quarantined number=%d reason=%s", number, reason)
        move_files(self._fs, self.path, entry)

    def check_segment(self, number: int) -> str:
        """Describe damage to a segment; empty if it is intact or gone. Any thread may call."""
        entries = [entry for entry in self.index.segments if entry.number == number]
        return find_damage(self._fs, self.path, entries[0]) if entries else ""

    # State

    def close(self) -> None:
        """Close the store and record this in the mark: any byte that changes later is damage."""
        try:
            if not self._broken and not self._log.doubtful:
                if self._durable < self._log.end:
                    self._log.sync()
                    self._durable = self._log.end
                self._write_mark(closed=True)
        finally:
            for file in (self._log, self._manifest, self._mark):
                with suppress(OSError):
                    file.close()
            self._unlock()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, event: AnyEvent) -> None:
        try:
            self._manifest.record(event)
        except BrokenStoreError as error:
            raise self._break(error) from error
        self._write_mark()

    def _write_mark(self, *, closed: bool = False) -> None:
        """Write the mark, synced only if the store is closed: no promise depends on it."""
        mark = Watermark(
            log=self._log.number,
            salt=self._log.salt,
            visible=self._log.end,
            durable=self._durable,
            manifest=self._manifest.size,
            closed=closed,
        )
        try:
            self._mark.write_at(0, mark.encode())
            if closed:
                self._mark.sync()
        except OSError as error:
            log.warning("event=mark-not-written error=%s", error)

    def _remove(self, paths: Sequence[Path]) -> None:
        """Remove files that the store no longer uses; if that fails, the next opening does it."""
        try:
            for path in paths:
                self._fs.unlink(path)
            for folder in {path.parent for path in paths}:
                self._fs.sync_folder(folder)
        except OSError as error:
            log.warning("event=file-not-removed error=%s", error)

    def _ack(self, status: AckStatus, expected: int, reason: str = "") -> Ack:
        return Ack(
            status=status, expected=expected, durability=self.options.durability, reason=reason
        )

    def _retry_once(self, action: Callable[[], None], event: str) -> None:
        """Run `action`, and once more if the disk fails; a second failure breaks the store. A full
        disk raises OSError instead, at once if the log is intact: room may come."""
        try:
            action()
        except OSError as error:
            self.require_working()
            if error.errno in FULL and not self._log.doubtful:
                raise
            log.error("%s log=%d error=%s", event, self._log.number, error)
            try:
                action()
            except OSError as again:
                self.require_working()
                if again.errno in FULL:
                    raise
                raise self._break(again) from again

    @contextmanager
    def _postponing(self, message: str, what: object) -> Iterator[None]:
        """Let the block fail while the disk is full; a later call tries again."""
        try:
            yield
        except OSError as error:
            self.require_working()
            log.warning(message, what, error)

    def _break(self, error: OSError) -> BrokenStoreError:
        """Mark the store as broken: from now on every call fails with the returned error."""
        self._broken = f"{self.path} cannot be written any more: {error}; look at the disk, then "
        self._broken += "start again: what was acknowledged is safe"
        log.critical("event=store-broken path=%s error=%s", self.path, error)
        return BrokenStoreError(error.errno, self._broken)

    def require_working(self) -> None:
        """Raise BrokenStoreError once the disk has failed twice."""
        if self._broken:
            raise BrokenStoreError(errno.EIO, self._broken)


def _totals(entries: Sequence[LogEntry]) -> StoredTotals:
    kept = [entry.episode for entry in entries if entry.episode is not None]
    return StoredTotals(
        episodes=len(kept),
        steps=sum(map(len, kept)),
        terminated=sum(episode.terminated for episode in kept),
        truncated=sum(episode.truncated and not episode.terminated for episode in kept),
    )


def _open_mark(fs: FS, path: Path) -> File:
    if MARK in fs.names(path):
        return fs.append(path / MARK)
    mark = fs.create(path / MARK)
    fs.sync_folder(path)
    return mark


def _lock_folder(fs: FS, path: Path) -> Callable[[], None]:
    """Lock the folder, which is made if missing; the returned function unlocks it."""
    try:
        if path.name not in fs.names(path.parent):
            fs.make_folder(path)
            fs.sync_folder(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} cannot be made: {path.parent} is no folder; make it") from None
    for pause in LOCK_PAUSES:  # a reader that only checks for a writer holds the lock for a moment
        try:
            return fs.lock(path, shared=False)
        except BlockingIOError:
            time.sleep(pause)
    raise InputError(
        f"{path} is being written by another process; a store has one writer: stop it first"
    )
