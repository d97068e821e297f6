"""`m3pc data import`: D4RL, robomimic or Minari data into one verified store."""

import hashlib
from dataclasses import asdict
from pathlib import Path

from m3pc.core.files import sha256, staged_directory
from m3pc.core.progress import OnProgress
from m3pc.datasets.download import locate
from m3pc.datasets.sandbox import SandboxLimits, run_limited
from m3pc.datasets.source import ImportOptions
from m3pc.types import InputError
from replay.store.store import Store


def ingest(
    source: str,
    out: Path,
    options: ImportOptions,
    limits: SandboxLimits,
    on_progress: OnProgress,
    *,
    expected_sha256: str | None = None,
) -> Store:
    """Import a path or a dataset id. Nothing appears at `out` unless the whole import succeeds."""
    with staged_directory(out) as stage:
        located = locate(source, on_progress)
        if not (located.path.is_file() or located.path.is_dir()):
            raise InputError(f"{located.path} is neither a file nor a folder; only those are read")
        digest = _digest(located.path)
        if expected_sha256 and digest != expected_sha256.lower():
            raise InputError(
                f"{located.path.name} has SHA-256 {digest}, expected {expected_sha256}"
            )
        job = {
            "path": str(located.path),
            "kind": located.kind,
            "name": located.name,
            "sha256": digest,
            "options": asdict(options),
            "out": str(stage),
        }
        run_limited("m3pc.datagen.convert", job, limits, on_progress)
        Store(stage)  # checks what the child wrote as strictly as any other store
    return Store(out)


def _is_file(file: Path, folder: Path) -> bool:
    """Whether it is a file. Refuses special files, and links that lead out of the folder."""
    if not (file.is_file() or file.is_dir()):
        raise InputError(f"{file} is neither a file nor a folder; only those are read")
    if file.is_symlink() and not file.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{file} is a link that leads out of {folder.name}; put the file there")
    return file.is_file()


def _digest(path: Path) -> str:
    """SHA-256 of the file, or of a folder's list of names and hashes."""
    if path.is_file():
        return sha256(path)
    files = sorted(file for file in path.rglob("*") if _is_file(file, path))
    listing = "".join(f"{sha256(file)}  {file.relative_to(path)}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()
