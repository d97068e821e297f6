"""The one process that appends to a live store. Every step says what must be on the disk before.

commit  judge each request, write the frames of those that are new, sync, tell
roll    segment files, synced -> their names, synced -> the next log, synced -> a line in the
        manifest, synced -> the old log may go
drop    a line in the manifest, synced -> the files may go
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from replay.format.segment import check_bytes, write_segment
from replay.format.watermark import NAME as MARK
from replay.format.watermark import Watermark
from replay.store import recovery
from replay.store.producers import Producers, following
from replay.store.recovery import QUARANTINE
from replay.writing.manifest_writer import BrokenStoreError, ManifestWriter

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # pass when somebody makes room

LOCK_PAUSES: Final = (0.01, 0.05, 0.2, 0.2, 0.0)  # seconds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    durability: Durability = "fsync"
    segment_bytes: int = 64 << 20  # of log, after which it becomes a segment
    keep_bytes: int | None = None  # of segments at most; the oldest go first
    keep_episodes: int | None = None  # at least; older segments go
    low_space: int = 2 << 30  # free bytes below which the oldest go too, if any may
    no_space: int = 512 << 20  # free bytes below which nothing is taken
    most_refused: int = 100  # episodes of one incarnation, after which it is shut out


class AppendRequest(NamedTuple):
    key: AppendKey
    content: Episode | PayloadError  # what its payload holds, or why it holds nothing


class Writer:
    """An EpisodeSink on a disk, for one thread. `Appender` serves many."""

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
        """Make the store, or recover it: all that was acknowledged is there again.

        accept_loss  go on although acknowledged bytes are damaged or gone; those are set aside
        """
        self.path, self.options = Path(path), options or WriterOptions()
        self._fs, self._salts = fs or Disk(), salts
        self._broken: str | None = None
        header = header.model_copy(update={"event": "live", "format": FORMAT})
        self._unlock = _locked(self._fs, self.path)
        try:
            self._recover(header, accept_loss)
        except BaseException:
            self._unlock()
            raise

    def _recover(self, header: Header, accept_loss: bool) -> None:
        fs, path = self._fs, self.path
        if manifest.NAME not in fs.names(path):
            recovery.create(fs, path, header, self._salts)
        found = recovery.find(fs, path, accept_loss=accept_loss)
        if found.listing.header.format != FORMAT:
            raise InputError(
                f"{path} has format {found.listing.header.format}, of an older version of m3pc: "
                f"it can be read and exported, but not changed; this version writes format "
                f"{FORMAT}; give another folder"
            )
        if found.listing.header != header:
            raise InputError(
                f"{path} was made for {found.listing.header.model_dump_json()}, not for "
                f"{header.model_dump_json()}; give another folder or the same settings"
            )
        self._log: Log = recovery.renew(fs, path, found, self._salts)
        self._durable = self._log.end
        self._ledger = ManifestWriter(fs, path, found.tally, len(found.manifest), found.crc)
        self._entries: list[LogEntry] = found.entries
        self._producers = Producers(found.listing.producers, self.options.most_refused)
        self._producers.advance(found.entries)
        self.totals = found.listing.totals.plus(_totals(found.entries))
        self._mark: File = _open_mark(fs, path)
        self._write_mark()
        for listed in found.lost:
            self.quarantine(listed.number, "damaged or missing when the store was opened")
        self.torn_bytes = found.torn_manifest + found.torn_log  # that a crash had left
        log.info(
            "event=store-opened path=%s segments=%d frames=%d torn_bytes=%d lost_segments=%d",
            path,
            len(self.listing.segments),
            len(found.entries),
            self.torn_bytes,
            len(found.lost),
        )

    @property
    def header(self) -> Header:
        return self.listing.header

    @property
    def listing(self) -> StoreIndex:
        return self._ledger.listing

    @property
    def size(self) -> int:
        """Bytes of the segments and the open log."""
        return sum(listed.bytes for listed in self.listing.segments) + self._log.end

    @property
    def steps(self) -> int:
        """In the store now."""
        return self.totals.steps - self.listing.gone_steps

    def producer(self, slot: int) -> ProducerState:
        """Where a slot stands, for whoever hands out incarnations."""
        return self._producers[slot]

    # Appending

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        return self.commit([self.request(key, payload)])[0]

    def request(self, key: AppendKey, payload: bytes) -> AppendRequest:
        """The costly part of an append; it needs nothing of the writer that changes."""
        try:
            return AppendRequest(key, decode(payload, self.header))
        except PayloadError as error:
            return AppendRequest(key, error)

    def commit(self, requests: Sequence[AppendRequest]) -> list[Ack]:
        """What becomes of each; those that are new are synced together."""
        self.require_whole()
        if not self._make_room():
            return self._all_later(requests, "the disk is almost full")
        acks, entries = self._judge(requests)
        if entries:
            full = self._save(entries)
            if full:
                return self._all_later(requests, full)
            self._producers.advance(entries)
            self._entries += entries
            self.totals = self.totals.plus(_totals(entries))
            self._write_mark()
            self._roll_if_due()
        return acks

    def early(self, key: AppendKey) -> Ack | None:
        """The answer to whatever is not the next of its producer: it needs no payload and writes
        nothing. Any thread may ask."""
        self.require_whole()
        status, expected, reason = self._producers.judge(key, {})
        return None if status is AckStatus.DURABLE else self._ack(status, expected, reason)

    def later(self, key: AppendKey, reason: str) -> Ack:
        return self._ack(AckStatus.RETRY_LATER, self._producers.expected(key), reason)

    def _judge(self, requests: Sequence[AppendRequest]) -> tuple[list[Ack], list[LogEntry]]:
        """The answers, if all goes well, and what must be in the log before they are given."""
        ahead: dict[int, ProducerState] = {}
        acks, entries = [], []
        for key, content in requests:
            status, expected, reason = self._producers.judge(key, ahead)
            if status is AckStatus.DURABLE:
                ahead[key.slot] = following(key)
                if isinstance(content, PayloadError):
                    status, reason = AckStatus.REJECTED, str(content)
                    entries.append(LogEntry(key, None, content.code))
                else:
                    entries.append(LogEntry(key, content))
            acks.append(self._ack(status, expected, reason))
        return acks, entries

    def _save(self, entries: list[LogEntry]) -> str:
        """Nothing if they are as safe as was asked for, or why there is no room for them now."""
        try:
            if self._log.doubtful:
                self._roll()
            self._write_and_sync(entries)
            return ""
        except OSError as error:
            self.require_whole()
            if error.errno in FULL and not self._log.doubtful:
                return str(error)
            log.error("event=sync-failed log=%d error=%s", self._log.number, error)
        return self._save_elsewhere(entries)

    def _save_elsewhere(self, entries: list[LogEntry]) -> str:
        """After a failed sync nobody knows what the log's end is. All that was acknowledged is in
        memory too: it becomes a segment, and what is new goes to the next log."""
        self._log.doubtful = True
        try:
            self._roll()
            self._write_and_sync(entries)
            return ""
        except OSError as error:
            self.require_whole()
            if error.errno in FULL:
                return str(error)
            raise self._break(error) from error

    def _write_and_sync(self, entries: list[LogEntry]) -> None:
        self._log.write(entries)
        if self.options.durability == "fsync":
            self._log.sync()
            self._durable = self._log.end

    # Segments

    def roll(self) -> None:
        """Make a segment of the log now."""
        self.require_whole()
        if self._entries:
            self._roll()

    def _roll_if_due(self) -> None:
        if self._log.end < self.options.segment_bytes:
            return
        try:
            self._roll()
        except OSError as error:
            self.require_whole()
            log.warning("event=roll-postponed log=%d error=%s", self._log.number, error)

    def _roll(self) -> None:
        """Twice, but for a full disk: each trial writes everything anew."""
        try:
            self._roll_once()
        except OSError as error:
            self.require_whole()
            if error.errno in FULL:
                raise
            log.error("event=roll-failed log=%d error=%s", self._log.number, error)
            try:
                self._roll_once()
            except OSError as again:
                if again.errno in FULL:
                    raise
                raise self._break(again) from again

    def _roll_once(self) -> None:
        number, folder = self._log.number, self.path / logs.FOLDER
        kept = [(e.key, e.episode) for e in self._entries if e.episode is not None]
        steps, episodes = (
            write_segment(self._fs, self.path, number, kept, self.listing) if kept else (None, None)
        )
        name = folder / logs.file_name(number + 1)
        next_log = logs.create(self._fs, name, number + 1, self.header, self._salts)
        slots = sorted({entry.key.slot for entry in self._entries})
        totals = _totals(self._entries)
        try:
            self._fs.sync_folder(folder)
            self._record(
                Roll(
                    number=number,
                    steps=steps,
                    episodes=episodes,
                    refused=len(self._entries) - len(kept),
                    terminated=totals.terminated,
                    truncated=totals.truncated,
                    producers=[(slot, *self._producers[slot]) for slot in slots],
                )
            )
        except OSError:
            next_log.close()
            raise
        self._log.close()
        self._log, self._durable, self._entries = next_log, next_log.end, []
        self._write_mark()
        self._remove([folder / logs.file_name(number)])
        self._retain()

    # Room

    def _retain(self) -> None:
        """Drop the oldest segments that the options do not keep."""
        segments, options = list(self.listing.segments), self.options
        gone = []
        while segments and (
            (options.keep_bytes is not None and sum(s.bytes for s in segments) > options.keep_bytes)
            or (
                options.keep_episodes is not None
                and sum(s.episodes.rows for s in segments[1:]) >= options.keep_episodes
            )
        ):
            gone.append(segments.pop(0).number)
        if gone:
            self._drop_quietly(gone)

    def _make_room(self) -> bool:
        """Whether there is room, after the oldest segment went where room is low."""
        free, options = self._fs.free_bytes(self.path), self.options
        may_drop = options.keep_bytes is not None or options.keep_episodes is not None
        if free < options.low_space and may_drop and len(self.listing.segments) > 1:
            self._drop_quietly([self.listing.segments[0].number])
        return free >= options.no_space

    def _drop_quietly(self, numbers: Sequence[int]) -> None:
        """If there is no room for the line in the manifest, the next time will do."""
        try:
            self.drop(numbers, "retention")
        except OSError as error:
            self.require_whole()
            log.warning("event=retention-postponed segments=%s error=%s", numbers, error)

    def drop(
        self, numbers: Sequence[int], reason: Literal["retention", "operator"] = "operator"
    ) -> None:
        """Forget segments. Their producers' sequence numbers stay used."""
        self.require_whole()
        known = {listed.number: listed for listed in self.listing.segments}
        unknown = sorted(set(numbers) - known.keys())
        if unknown:
            raise InputError(
                f"{self.path} has no segments {unknown}; it has {sorted(known)[:20]}; "
                "`m3pc replay info` lists them"
            )
        self._record(Drop(numbers=list(numbers), reason=reason))
        files = [entry for n in numbers for entry in (known[n].steps, known[n].episodes)]
        self._remove([self.path / SEGMENTS / entry.name for entry in files])

    def withdraw(self, slot: int, incarnation: int | None = None) -> None:
        self.require_whole()
        self._record(Withdraw(slot=slot, incarnation=incarnation))

    def quarantine(self, number: int, reason: str) -> None:
        """Set a damaged segment aside: it is no part of the store any more, but nothing is lost."""
        self.require_whole()
        (listed,) = [s for s in self.listing.segments if s.number == number]
        self._record(Quarantine(number=number, reason=reason[:500]))
        log.error("event=segment-quarantined number=%d reason=%s", number, reason)
        for entry in (listed.steps, listed.episodes):
            if entry.name in self._fs.names(self.path / SEGMENTS):
                recovery.set_aside(self._fs, self.path, entry.name)
        for folder in (SEGMENTS, QUARANTINE):
            self._fs.sync_folder(self.path / folder)

    def damage(self, number: int) -> str:
        """What is wrong with a segment's files; nothing if it is whole or not there any more. Only
        reads: any thread may ask."""
        for listed in self.listing.segments:
            if listed.number == number:
                try:
                    for entry in (listed.steps, listed.episodes):
                        check_bytes(self._fs, self.path / SEGMENTS, entry)
                except InputError as error:
                    return str(error)
        return ""

    # State

    def close(self) -> None:
        """End in order: from then on not a byte may be missing or added."""
        try:
            if not self._broken and not self._log.doubtful:
                if self._durable < self._log.end:
                    self._log.sync()
                    self._durable = self._log.end
                self._write_mark(closed=True)
        finally:
            for file in (self._log, self._ledger, self._mark):
                with suppress(OSError):
                    file.close()
            self._unlock()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, event: AnyEvent) -> None:
        try:
            self._ledger.record(event)
        except BrokenStoreError as error:
            raise self._break(error) from error
        self._write_mark()

    def _write_mark(self, *, closed: bool = False) -> None:
        """Nobody waits for it, and nothing that was promised depends on it."""
        mark = Watermark(
            log=self._log.number,
            salt=self._log.salt,
            visible=self._log.end,
            durable=self._durable,
            manifest=self._ledger.size,
            closed=closed,
        )
        try:
            self._mark.write_at(0, mark.encode())
            if closed:
                self._mark.sync()
        except OSError as error:
            log.warning("event=mark-not-written error=%s", error)

    def _remove(self, paths: Sequence[Path]) -> None:
        """Files that count no more; if that fails now, opening the store does it."""
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

    def _all_later(self, requests: Sequence[AppendRequest], reason: str) -> list[Ack]:
        return [self.later(request.key, reason) for request in requests]

    def _break(self, error: OSError) -> BrokenStoreError:
        self._broken = f"{self.path} cannot be written any more: {error}; look at the disk, then "
        self._broken += "start again: what was acknowledged is safe"
        log.critical("event=store-broken path=%s error=%s", self.path, error)
        return BrokenStoreError(error.errno, self._broken)

    def require_whole(self) -> None:
        """BrokenStoreError once nothing more can be promised."""
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


def _locked(fs: FS, path: Path) -> Callable[[], None]:
    """The folder, made where there is none, for nobody else."""
    try:
        if path.name not in fs.names(path.parent):
            fs.make_folder(path)
            fs.sync_folder(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} cannot be made: {path.parent} is no folder; make it") from None
    for pause in LOCK_PAUSES:  # who only looks whether there is a writer is gone at once
        try:
            return fs.lock(path, shared=False)
        except BlockingIOError:
            time.sleep(pause)
    raise InputError(
        f"{path} is being written by another process; a store has one writer: stop it first"
    )
