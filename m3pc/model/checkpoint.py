"""Weights and training state on disk, without pickle; a checkpoint is complete or absent.

CHECKPOINTS/LATEST                          name of the newest checkpoint
CHECKPOINTS/000008000/metadata.json         format, sizes, settings, SHA-256 of the other files
CHECKPOINTS/000008000/weights.safetensors   all that planning needs
CHECKPOINTS/000008000/training.safetensors  all that training needs in addition
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
    current_folder,
    durable_file,
    remove_directory,
    replace_file,
    replaced_folder,
    sha256,
    staged_directory,
)
from m3pc.model.weights import (
    Weights,
    check_description,
    checksum,
    description,
    weights_from_description,
)
from m3pc.types import InputError

log = logging.getLogger(__name__)

FORMAT = 1
METADATA, WEIGHTS, TRAINING, LATEST = (
    "metadata.json",
    "weights.safetensors",
    "training.safetensors",
    "LATEST",
)
MAX_METADATA = 1 << 20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: Path
    weights: Weights
    training: Mapping[str, Tensor]  # empty in a checkpoint that can only plan
    progress: Mapping[str, Any]  # counters and notes of the training process
    passed_over: int = 0  # newer checkpoints of the run that are damaged


def write(
    path: Path,
    weights: Weights,
    training: Mapping[str, Tensor],
    progress: Mapping[str, Any],
    *,
    replace: bool = False,
) -> None:
    """Write a checkpoint to a temporary folder, make it durable, and rename it to `path`."""
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
            **description(weights),
            "progress": dict(progress),
            "files": files,
        }
        metadata["check"] = checksum(metadata)
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
    """Write a run's checkpoint, named by its number, point LATEST to it, keep the newest `keep`.

    A checkpoint of the same number stays until its replacement is complete: it may be the only one.
    """
    path = folder / f"{number:09d}"
    write(path, weights, training, progress, replace=True)
    publish(path)
    for old in _numbered(folder)[:-keep]:
        remove_directory(old)
    return path


def publish(path: Path) -> None:
    """Point the run's LATEST to a checkpoint."""
    replace_file(path.parent / LATEST, f"{path.name}\n".encode())


def read(path: Path | str) -> Checkpoint:
    """Read a checkpoint, or the newest one in a run or folder `path`. Every byte is checked."""
    folder = locate(Path(path))
    files = current_folder(folder)
    metadata = _metadata(files / METADATA)
    tensors = {
        name: _tensors(files / name, metadata["files"].get(name)) for name in (WEIGHTS, TRAINING)
    }
    try:
        weights = weights_from_description(metadata, tensors[WEIGHTS], METADATA)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    return Checkpoint(
        path=folder, weights=weights, training=tensors[TRAINING], progress=metadata["progress"]
    )


def read_newest(folder: Path) -> Checkpoint:
    """Read a run's newest undamaged checkpoint, to resume from it.

    `read` never falls back: a user who names a checkpoint gets that one or an error.
    """
    reasons: list[str] = []
    for path in reversed(_numbered(folder)):
        try:
            return dataclasses.replace(read(path), passed_over=len(reasons))
        except InputError as error:
            log.warning("event=checkpoint-passed-over path=%s reason=%r", path, str(error))
            reasons.append(str(error))
    raise InputError(
        f"{folder} has no checkpoint to go on from: {'; '.join(reasons) or 'none'}; give the "
        "folder of a run"
    )


def locate(path: Path) -> Path:
    """The path of the checkpoint at `path`, or of the newest one under it. Apply `current_folder`
    to the result to reach its files."""
    for folder in (path, path / "checkpoints"):
        if (current_folder(folder) / METADATA).is_file():
            return folder
        if (folder / LATEST).is_file():
            with (folder / LATEST).open(encoding="utf-8", errors="replace") as file:
                name = file.read(64).strip()  # a damaged file may be long
            if name.isdecimal():
                return folder / name
    raise InputError(f"{path} is not a checkpoint; give a run, or a folder with {METADATA}")


def _numbered(folder: Path) -> list[Path]:
    """The paths of the numbered checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir()}
    numbers = {match[0] for name in names if (match := re.search("[0-9]{9}", name))}
    paths = [folder / number for number in sorted(numbers)]
    return [path for path in paths if names & {path.name, replaced_folder(path).name}]


def _metadata(path: Path) -> dict[str, Any]:
    """The fields of metadata.json, checked."""
    if path.is_symlink():
        raise InputError(f"{path} is a link; give the folder that it leads to")
    try:
        with path.open("rb") as file:
            metadata: Any = json.loads(file.read(MAX_METADATA))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}; use another one") from None
    written = metadata.get("format") if isinstance(metadata, dict) else None
    if written != FORMAT:
        raise InputError(f"{path} has format {written!r}; this version reads format {FORMAT}")
    if metadata.get("check") != checksum(metadata):
        raise InputError(f"{path} was changed: its own checksum differs; use another checkpoint")
    try:
        check_description(metadata)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    for name in ("progress", "files"):
        if not isinstance(metadata.get(name), dict):
            raise InputError(f"{path}: {name} is {metadata.get(name)!r}, expected {dict}")
    checked: dict[str, Any] = metadata
    return checked


def _tensors(path: Path, entry: object) -> dict[str, Tensor]:
    if not isinstance(entry, dict) or not path.is_file() or path.is_symlink():
        raise InputError(f"{path} is missing; use another checkpoint")
    same_size = path.stat().st_size == entry.get("bytes")  # else it may be too large to read
    content = path.read_bytes() if same_size else b""
    if not same_size or hashlib.sha256(content).hexdigest() != entry.get("sha256"):
        raise InputError(f"{path} was changed: it differs from {METADATA}; use another checkpoint")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{path} is not readable as safetensors: {error}") from None
