"""Leaks of memory, files and threads, each as a change of the code that runs.

A soak that does not find them proves nothing about the code without them.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from m3pc.types import Ack
from replay.format import manifest, segment
from replay.format.fs import Disk, DiskFile
from replay.format.log import LogEntry
from replay.format.manifest import ParsedManifest
from replay.format.segment import Segment
from replay.store.producers import Producers
from replay.store.store import Store
from replay.writing import writer
from replay.writing.retention import RetentionLimits
from replay.writing.writer import AppendRequest, Writer

Patch = pytest.MonkeyPatch


def entries_kept(patch: Patch) -> None:
    advance = Producers.advance
    kept: list[LogEntry] = []

    def careless(self: Producers, entries: Sequence[LogEntry]) -> None:
        kept.extend(entries)
        advance(self, entries)

    patch.setattr(Producers, "advance", careless)


def bytes_kept(patch: Patch) -> None:
    """Half of every transition."""
    commit = Writer.commit
    kept: list[bytes] = []

    def careless(self: Writer, requests: Sequence[AppendRequest]) -> list[Ack]:
        sizes = [len(r.content) for r in requests if not isinstance(r.content, Exception)]
        kept.append(b"x" * (8 * sum(sizes)))
        return commit(self, requests)

    patch.setattr(Writer, "commit", careless)


def files_not_removed(patch: Patch) -> None:
    patch.setattr(Disk, "unlink", lambda self, path: None)


def files_not_closed(patch: Patch) -> None:
    patch.setattr(DiskFile, "close", lambda self: None)


def manifests_kept(patch: Patch) -> None:
    """As the reader has parsed them."""
    parse = manifest.parse
    kept: list[ParsedManifest] = []

    def careless(content: bytes, path: Path) -> ParsedManifest:
        kept.append(parse(content, path))
        return kept[-1]

    patch.setattr(manifest, "parse", careless)


def views_kept(patch: Patch) -> None:
    latest = Store.latest
    kept: list[Store] = []

    def careless(self: Store) -> Store:
        kept.append(self)
        return latest(self)

    patch.setattr(Store, "latest", careless)


def dropped_segments_kept(patch: Patch) -> None:
    """The reader never forgets what it has opened."""
    latest = Store.latest
    kept: list[Segment] = []

    def careless(self: Store) -> Store:
        kept.extend(s for s in self.segments if not s.states.flags.owndata)  # mapped
        return latest(self)

    patch.setattr(Store, "latest", careless)


def retention_forgotten(patch: Patch) -> None:
    patch.setattr(RetentionLimits, "beyond_limits", lambda self, segments: [])


def threads_left(patch: Patch) -> None:
    write_segment, end = segment.write_segment, threading.Event()

    def careless(*arguments: Any) -> Any:
        threading.Thread(target=end.wait, args=(20,), daemon=True).start()
        return write_segment(*arguments)

    patch.setattr(writer, "write_segment", careless)


def invalid_remembered(patch: Patch) -> None:
    """An entry for every incarnation that ever sent invalid data."""
    advance = Producers.advance

    def careless(self: Producers, entries: Sequence[LogEntry]) -> None:
        advance(self, entries)
        table: dict[Any, Any] = self._refused
        for entry in entries:
            if entry.episode is None:
                table[entry.key[:2]] = (entry.key.incarnation, 1)

    patch.setattr(Producers, "advance", careless)


class Leak(NamedTuple):
    put_in: Callable[[Patch], None]
    shows_in: str  # what the soak says is wrong


LEAKS = {
    "entries kept": Leak(entries_kept, "episodes in memory"),
    "eight bytes a transition kept": Leak(bytes_kept, "bytes a transition"),
    "files not removed": Leak(files_not_removed, "files"),
    "files not closed": Leak(files_not_closed, "descriptors"),
    "manifests kept": Leak(manifests_kept, "bytes a transition"),
    "views kept": Leak(views_kept, "segments in memory"),
    "dropped segments kept": Leak(dropped_segments_kept, "descriptors, segments in memory"),
    "retention forgotten": Leak(retention_forgotten, "bytes of segments"),
    "threads left": Leak(threads_left, "threads"),
    "invalid data remembered": Leak(invalid_remembered, "suspects"),
}
