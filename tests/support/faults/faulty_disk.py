"""A real disk that is full or broken while a test says so."""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from m3pc.model.weights import Weights
from m3pc.serving.recording import EpisodeRecording
from replay.format.fs import Disk, DiskFile


class FaultyDisk(Disk):
    def __init__(self) -> None:
        self.full = False  # there is no space left
        self.broken = False  # writes fail with EIO

    def free_bytes(self, path: Path) -> int:
        return 0 if self.full else super().free_bytes(path)

    def create(self, path: Path) -> DiskFile:
        self.check()
        return FaultyFile(self, super().create(path))

    def append(self, path: Path) -> DiskFile:
        return FaultyFile(self, super().append(path))

    def check(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")


class FaultyFile(DiskFile):
    def __init__(self, disk: FaultyDisk, file: DiskFile) -> None:
        self._disk, self._file = disk, file

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        self._disk.check()
        self._file.write(parts)

    def write_at(self, offset: int, content: bytes) -> None:
        self._disk.check()
        self._file.write_at(offset, content)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def sync(self) -> None:
        self._disk.check()
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def recording_on(disk: FaultyDisk, **options: Any) -> Callable[[Path, Weights], EpisodeRecording]:
    return lambda path, weights: EpisodeRecording(path, weights, fs=disk, **options)
