"""Files that are either complete or absent: staged folders, durable writes, hashes."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from m3pc.types import InputError


def sha256(path: Path) -> str:
    """The file's hash in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make the names in a folder survive a power loss, as fsync does for a file's bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """A new file for writing; it and its name are on disk when the block ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` new content; a reader sees the complete old content or the complete new one."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with durable_file(new) as file:
        file.write(content)
    new.replace(path)
    sync_directory(path.parent)


def refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} exists already; give another name or remove it first")


@contextmanager
def staged_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder beside `path` that is renamed to `path` when the block ends, or removed.

    An existing folder at `path` is refused or, with `replace`, set aside: at every moment
    `current_folder` finds the complete old or the complete new folder. The stage of a killed
    process is emptied and used again; while a living process holds it, InputError is raised.
    """
    stage = path.parent / f".{path.name}.partial"
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        if not replace:
            refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir(exist_ok=True)
        descriptor = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        _remove_empty(made)
        raise InputError(f"{path} cannot be made: {error}; give another name") from None
    try:
        if not _own(descriptor, stage):
            raise InputError(f"{path} is being written by another process; wait for it")
        _empty(stage)
        try:
            yield stage
            sync_directory(stage)
            if replace:
                _set_aside(path)
            refuse_existing(path)
            stage.rename(path)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            _remove_empty(made)
            raise
        sync_directory(path.parent)
        if replace:
            _remove(replaced_folder(path))
    finally:
        os.close(descriptor)


def replaced_folder(path: Path) -> Path:
    """Where the old folder is kept until the new one has its name."""
    return path.parent / f".{path.name}.replaced"


def current_folder(path: Path) -> Path:
    """`path`, or the folder set aside if the process was killed before it renamed the new one."""
    return path if path.exists() or not replaced_folder(path).exists() else replaced_folder(path)


def remove_directory(path: Path) -> None:
    """Remove `path`, after any older folder, so that `current_folder` never finds the older."""
    _remove(replaced_folder(path))
    _remove(path)


def _set_aside(path: Path) -> None:
    """Move `path` aside, if it exists, in place of any older folder there."""
    if path.exists():
        sync_directory(path.parent)
        _remove(replaced_folder(path))
        path.rename(replaced_folder(path))


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _own(descriptor: int, folder: Path) -> bool:
    """Lock an open folder. False if it is locked, or another folder has taken its name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), folder.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, innermost first, except those that another process has filled."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
