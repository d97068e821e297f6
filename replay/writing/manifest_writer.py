"""The manifest of a live store while it grows: a line is on the disk, or the store is broken."""

import errno
from pathlib import Path

from replay.format import manifest
from replay.format.fs import FS
from replay.format.index import IndexBuilder, StoreIndex
from replay.format.manifest import AnyEvent


class BrokenStoreError(OSError):
    """The disk failed twice: nothing more can be promised until the store is opened again."""


class ManifestWriter:
    def __init__(self, fs: FS, path: Path, tally: IndexBuilder, size: int, crc: int) -> None:
        """A manifest of `size` bytes whose last line has the digits `crc`."""
        self._tally, self.size, self._crc = tally, size, crc
        self._file = fs.append(path / manifest.NAME)
        self.listing: StoreIndex = tally.listing()

    def record(self, event: AnyEvent) -> None:
        """Append a line. OSError: there is none; BrokenStoreError: who knows."""
        line = manifest.encode([event], self._crc)
        if self.size + len(line) > manifest.LARGEST:  # nobody would read it any more
            raise OSError(errno.EFBIG, "the manifest is full; go on with another store")
        try:
            self._file.write([line])
        except OSError:
            self._cut()
            raise
        self._sync()
        self.size, self._crc = self.size + len(line), int(line[:8], 16)
        self._tally.add(event)
        self.listing = self._tally.listing()

    def _cut(self) -> None:
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
        except OSError as error:  # asking again would tell nothing
            raise BrokenStoreError(error.errno, f"the manifest was not synced: {error}") from None

    def close(self) -> None:
        self._file.close()
