"""Weights and the state of training on disk, whole or absent, without pickle.

CHECKPOINTS/LATEST                          name of the newest
CHECKPOINTS/000008000/metadata.json         format, sizes, settings, SHA-256 of the other files
CHECKPOINTS/000008000/weights.safetensors   all that a plan needs
CHECKPOINTS/000008000/training.safetensors  all that training needs beside them
"""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from m3pc.core.files import (
    aside,
    durable_file,
    remove_directory,
    replace_file,
    sha256,
    staged_directory,
    standing,
)
from m3pc.model.weights import Weights, check_description, check_sum, described, restored
from m3pc.types import InputError

log = logging.getLogger(__name__)

FORMAT = 1
METADATA, WEIGHTS, TRAINING, LATEST = (
    "metadata.json",
    "weights.safetensors",
    "training.safetensors",
    "LATEST",
)
LARGEST_METADATA = 1 << 20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: Path
    weights: Weights
    training: Mapping[str, Tensor]  # empty where there is only a model to plan with
    progress: Mapping[str, Any]  # counters and notes of whoever trained
    passed_over: int = 0  # newer ones of the run that were damaged


def write(
    path: Path,
    weights: Weights,
    training: Mapping[str, Tensor],
    progress: Mapping[str, Any],
    *,
    replace: bool = False,
) -> None:
    """A new checkpoint at `path`: written aside, made durable, then named."""
    with staged_directory(path, replace=replace) as stage:
        files = {}
        for name, tensors in ((WEIGHTS, weights.tensors), (TRAINING, training)):
            with durable_file(stage / name) as file:
                file.write(save({key: tensor.contiguous() for key, tensor in tensors.items()}))
            files[name] = {
                "bytes": (stage / name).stat().st_size,
                "sha256": sha256(stage / name),
            }
        metadata = {
            "format": FORMAT,
            **described(weights),
            "progress": dict(progress),
            "files": files,
        }
        metadata["check"] = check_sum(metadata)
        with durable_file(stage / METADATA) as file:
            file.write(json.dumps(metadata, indent=1).encode())


def write_next(
    folder: Path,
    weights: Weights,
    training: Mapping[str, Tensor],
    progress: Mapping[str, Any],
    *,
    number: int,
    keep: int,
) -> Path:
    """A checkpoint of a run, named by its number; then LATEST; then the old ones go.

    One of the same number stays until its replacement is whole: it may be the only one.
    """
    path = folder / f"{number:09d}"
    write(path, weights, training, progress, replace=True)
    publish(path)
    for old in _numbered(folder)[:-keep]:
        remove_directory(old)
    return path


def publish(path: Path) -> None:
    """Make a checkpoint of a run the newest."""
    replace_file(path.parent / LATEST, f"{path.name}\n".encode())


def read(path: Path | str) -> Checkpoint:
    """A checkpoint, or the newest of a run or of a folder of checkpoints. Every byte is checked."""
    folder = locate(Path(path))
    found = standing(folder)
    metadata = _metadata(found / METADATA)
    tensors = {
        name: _tensors(found / name, metadata["files"].get(name)) for name in (WEIGHTS, TRAINING)
    }
    try:
        weights = restored(metadata, tensors[WEIGHTS], METADATA)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    return Checkpoint(
        path=folder, weights=weights, training=tensors[TRAINING], progress=metadata["progress"]
    )


def newest(folder: Path) -> Checkpoint:
    """The last checkpoint of a run that is whole: a damaged one is passed over for the one before.

    Only a resumed run may do so; whoever names a checkpoint gets that one or an error.
    """
    reasons: list[str] = []
    for path in reversed(_numbered(folder)):
        try:
            return dataclasses.replace(read(path), passed_over=len(reasons))
        except InputError as error:
            log.warning("checkpoint passed over path=%s reason=%s", path, error)
            reasons.append(str(error))
    raise InputError(
        f"{folder} has no checkpoint to go on from: {'; '.join(reasons) or 'none'}; give the "
        "folder of a run"
    )


def locate(path: Path) -> Path:
    """The name of a checkpoint: `path`, or the newest under it. `standing` finds its files."""
    for folder in (path, path / "checkpoints"):
        if (standing(folder) / METADATA).is_file():
            return folder
        if (folder / LATEST).is_file():
            with (folder / LATEST).open(encoding="utf-8", errors="replace") as file:
                name = file.read(64).strip()  # however long it is
            if name.isdecimal():
                return folder / name
    raise InputError(f"{path} is not a checkpoint; give a run, or a folder with {METADATA}")


def _numbered(folder: Path) -> list[Path]:
    """The names of checkpoints that stand there."""
    if not folder.is_dir():
        return []
    found = {path.name for path in folder.iterdir()}
    numbers = {match[0] for name in found if (match := re.search("[0-9]{9}", name))}
    paths = [folder / number for number in sorted(numbers)]
    return [path for path in paths if found & {path.name, aside(path).name}]


def _metadata(path: Path) -> dict[str, Any]:
    """The checked fields of metadata.json."""
    if path.is_symlink():
        raise InputError(f"{path} is a link; give the folder that it leads to")
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(LARGEST_METADATA))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}; use another one") from None
    written = found.get("format") if isinstance(found, dict) else None
    if written != FORMAT:
        raise InputError(f"{path} has format {written!r}; this version reads format {FORMAT}")
    if found.get("check") != check_sum(found):
        raise InputError(f"{path} was changed: its own checksum differs; use another checkpoint")
    try:
        check_description(found)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    for name in ("progress", "files"):
        if not isinstance(found.get(name), dict):
            raise InputError(f"{path}: {name} is {found.get(name)!r}, expected {dict}")
    checked: dict[str, Any] = found
    return checked


def _tensors(path: Path, entry: object) -> dict[str, Tensor]:
    if not isinstance(entry, dict) or not path.is_file() or path.is_symlink():
        raise InputError(f"{path} is missing; use another checkpoint")
    whole = path.stat().st_size == entry.get("bytes")  # else it may have any size
    content = path.read_bytes() if whole else b""
    if not whole or hashlib.sha256(content).hexdigest() != entry.get("sha256"):
        raise InputError(f"{path} was changed: it differs from {METADATA}; use another checkpoint")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{path} is not readable as safetensors: {error}") from None
