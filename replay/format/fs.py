"""The disk operations of a live store, as a protocol so that tests can simulate a disk.

Bytes are on the disk after `File.sync`, names after `sync_folder` of their folder. Until then a
power loss may undo any of them, in any order: `tests/support/faults/sim_fs.py` simulates this.
"""

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from m3pc.core.files import sync_directory

MAX_PARTS = 1024  # Linux takes no more in one call
TEMPORARY = ".new"  # suffix of files that are being written
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block


class File(Protocol):
    """An open file that grows at its end."""

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Append all parts, or raise OSError; bytes written before an error stay."""

    def write_at(self, offset: int, content: bytes) -> None: ...
    def truncate(self, size: int) -> None: ...
    def sync(self) -> None:
        """After an error the content on the disk is unknown: never call it again on this file."""

    def close(self) -> None: ...


class FS(Protocol):
    def create(self, path: Path) -> File:
        """Create a file. FileExistsError: the name is taken, perhaps by a link."""

    def append(self, path: Path) -> File: ...
    def read(self, path: Path) -> bytes: ...
    def map(self, path: Path) -> bytes | mmap.mmap:
        """Return the content of a file, memory-mapped where possible."""

    def names(self, folder: Path) -> list[str]:
        """Return the sorted names in a folder; none if there is no such folder."""

    def make_folder(self, path: Path) -> None: ...
    def rename(self, old: Path, new: Path) -> None:
        """Replaces an existing file of the new name."""

    def unlink(self, path: Path) -> None: ...
    def sync_folder(self, path: Path) -> None: ...
    def free_bytes(self, path: Path) -> int: ...
    def lock(self, folder: Path, *, shared: bool) -> Callable[[], None]:
        """Lock a folder until the returned function is called. Shared locks exclude only
        exclusive ones. BlockingIOError: another process holds a lock that excludes this one."""


class DiskFile:
    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_END)
        _write_all(self._descriptor, parts)

    def write_at(self, offset: int, content: bytes) -> None:
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        _write_all(self._descriptor, [content])

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Disk:
    """The real file system."""

    def create(self, path: Path) -> DiskFile:
        return DiskFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def append(self, path: Path) -> DiskFile:
        return DiskFile(path, os.O_RDWR)

    def read(self, path: Path) -> bytes:
        descriptor = os.open(path, _READ)
        with open(descriptor, "rb") as file:
            return file.read()

    def map(self, path: Path) -> bytes | mmap.mmap:
        descriptor = os.open(path, _READ)
        try:
            size = os.fstat(descriptor).st_size  # nothing of size 0 can be mapped
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else b""
        finally:
            os.close(descriptor)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_folder(self, path: Path) -> None:
        sync_directory(path)

    def free_bytes(self, path: Path) -> int:
        volume = os.statvfs(path)
        return volume.f_bavail * volume.f_frsize

    def lock(self, folder: Path, *, shared: bool) -> Callable[[], None]:
        """Locks the folder itself: a lock file could be lost or left behind."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return lambda: os.close(descriptor)


def write_file(fs: FS, path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file and sync its content, but not its name. Replaces an existing file."""
    if path.name in fs.names(path.parent):
        fs.unlink(path)
    file = fs.create(path)
    try:
        file.write(parts)
        file.sync()
    finally:
        file.close()


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write the parts without joining them; `writev` may take fewer bytes than it is given."""
    rest = deque(memoryview(part).cast("B") for part in parts)
    while rest:
        taken = os.writev(descriptor, list(islice(rest, MAX_PARTS)))
        while rest and len(rest[0]) <= taken:
            taken -= len(rest.popleft())
        if rest:
            rest[0] = rest[0][taken:]
