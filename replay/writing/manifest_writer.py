"""Appends to the manifest of a live store. A failed append is undone, or the store is broken."""

import errno
from pathlib import Path

from replay.format import manifest
from replay.format.fs import FS
from replay.format.index import IndexBuilder, StoreIndex
from replay.format.manifest import AnyEvent


class BrokenStoreError(OSError):
    """The disk failed twice: nothing more can be promised until the store is opened again."""


class ManifestWriter:
    def __init__(self, fs: FS, path: Path, builder: IndexBuilder, size: int, crc: int) -> None:
        """The manifest has `size` bytes, and its last line the checksum `crc`."""
        self._builder, self.size, self._crc = builder, size, crc
        self._file = fs.append(path / manifest.NAME)
        self.index: StoreIndex = builder.index()

    def record(self, event: AnyEvent) -> None:
        """Append a line and sync. After an OSError the manifest is as before; after a
        BrokenStoreError its end is unknown."""
        line = manifest.encode([event], self._crc)
        if self.size + len(line) > manifest.MAX_BYTES:  # no reader would accept it
            raise OSError(errno.EFBIG, "the manifest is full; go on with another store")
        try:
            self._file.write([line])
        except OSError:
            self._cut()
            raise
        self._sync()
        self.size, self._crc = self.size + len(line), int(line[:8], 16)
        self._builder.add(event)
        self.index = self._builder.index()

    def _cut(self) -> None:
        """Cut off a failed write."""
        try:
            self._file.truncate(self.size)
        except OSError as error:
            raise BrokenStoreError(
                error.errno, f"half a line stays in the manifest: {error}"
            ) from None
        self._sync()

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:  # a second sync would prove nothing
            raise BrokenStoreError(error.errno, f"the manifest was not synced: {error}") from None

    def close(self) -> None:
        self._file.close()
