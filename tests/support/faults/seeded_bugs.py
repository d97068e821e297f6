"""Twelve well-known mistakes of storage engines, each as a change of the code that runs.

A crash test that does not find them proves nothing about the code without them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from m3pc.types import AckStatus, AppendKey, Episode
from replay.format import log, segment
from replay.format.fs import FS
from replay.format.index import StoreIndex
from replay.format.log import Log
from replay.format.manifest import AnyEvent, Drop, FileEntry, Roll
from replay.store import recovery
from replay.store.producers import Producers, Verdict
from replay.store.recovery import RecoveredStore
from replay.writing import writer
from replay.writing.manifest_writer import ManifestWriter
from replay.writing.writer import Writer
from tests.support.faults.sim_fs import SimFS

Patch = pytest.MonkeyPatch


def no_folder_sync(patch: Patch) -> None:
    patch.setattr(SimFS, "sync_folder", lambda self, path: None)


def ack_before_sync(patch: Patch) -> None:
    patch.setattr(Log, "sync", lambda self: None)


def no_checksum_of_heads(patch: Patch) -> None:
    checksum = log.checksum
    patch.setattr(log, "checksum", lambda parts, salt: checksum(parts[-1:], salt))


def salt_ignored(patch: Patch) -> None:
    checksum = log.checksum
    patch.setattr(log, "checksum", lambda parts, salt: checksum(parts, b""))


def rename_before_sync(patch: Patch) -> None:
    """The files of a segment get their names without a sync."""
    create = SimFS.create

    def careless(self: SimFS, path: Path) -> Any:
        file = create(self, path)
        if path.parent.name == segment.FOLDER:
            patch.setattr(file, "sync", lambda: None, raising=False)
        return file

    patch.setattr(SimFS, "create", careless)


def cut_not_synced(patch: Patch) -> None:
    def cut(self: Log) -> None:
        self._file.truncate(self.end)

    patch.setattr(Log, "cut", cut)


def numbers_forgotten(patch: Patch) -> None:
    begin = Producers.__init__
    patch.setattr(
        Producers, "__init__", lambda self, known, max_refused: begin(self, {}, max_refused)
    )


def gap_accepted(patch: Patch) -> None:
    judge = Producers.judge

    def careless(self: Producers, key: AppendKey, ahead: Any) -> Verdict:
        verdict = judge(self, key, ahead)
        gap = verdict.refusal is AckStatus.GAP
        return Verdict(None, key.sequence + 1) if gap else verdict

    patch.setattr(Producers, "judge", careless)


def manifest_before_data(patch: Patch) -> None:
    """The line in the manifest is written before the files that it names."""
    late: list[Callable[[], object]] = []
    write_segment, record = segment.write_segment, ManifestWriter.record

    def note(
        fs: FS,
        path: Path,
        number: int,
        kept: Sequence[tuple[AppendKey, Episode]],
        index: StoreIndex,
    ) -> tuple[FileEntry, FileEntry]:
        aside = SimFS(path)
        aside.make_folder(path / segment.FOLDER)
        late.append(lambda: write_segment(fs, path, number, kept, index))
        return write_segment(aside, path, number, kept, index)

    def then_write(self: ManifestWriter, event: AnyEvent) -> None:
        record(self, event)
        while late:
            late.pop()()

    patch.setattr(writer, "write_segment", note)
    patch.setattr(ManifestWriter, "record", then_write)


def unlink_before_manifest(patch: Patch) -> None:
    record = Writer._record

    def careless(self: Writer, event: AnyEvent) -> None:
        if isinstance(event, Roll):
            self._remove([self.path / log.FOLDER / log.file_name(event.number)])
        if isinstance(event, Drop):
            gone = [s for s in self.index.segments if s.number in event.numbers]
            names = [entry.name for s in gone for entry in (s.steps, s.episodes)]
            self._remove([self.path / segment.FOLDER / name for name in names])
        record(self, event)

    patch.setattr(Writer, "_record", careless)


def sync_again_after_error(patch: Patch) -> None:
    def twice(self: Log) -> None:
        try:
            self._file.sync()
        except OSError:
            self._file.sync()

    patch.setattr(Log, "sync", twice)


def recovery_once_only(patch: Patch) -> None:
    """The old log is removed before the new one is complete: wrong if it crashes in between."""
    renew = recovery.renew

    def careless(fs: FS, path: Path, recovered: RecoveredStore, salts: log.Salts) -> Log:
        name = log.file_name(recovered.index.rolls)
        if name in fs.names(path / log.FOLDER):
            fs.unlink(path / log.FOLDER / name)
        return renew(fs, path, recovered, salts)

    patch.setattr(recovery, "renew", careless)


BUGS: dict[str, Callable[[Patch], None]] = {
    "no fsync of folders": no_folder_sync,
    "acknowledged before fsync": ack_before_sync,
    "no checksum of heads": no_checksum_of_heads,
    "salt ignored": salt_ignored,
    "rename before fsync": rename_before_sync,
    "truncate without fsync": cut_not_synced,
    "used numbers not rebuilt": numbers_forgotten,
    "gap accepted": gap_accepted,
    "manifest before data": manifest_before_data,
    "unlink before manifest": unlink_before_manifest,
    "fsync again after an error": sync_again_after_error,
    "recovery that works once": recovery_once_only,
}
