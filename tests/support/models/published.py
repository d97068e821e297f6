"""Versions of small weights, published as a learner would."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from m3pc.config.schema import Config
from m3pc.model.weights import Weights, to_bytes
from m3pc.types import Coordinator, Pointer, Published, Version
from tests.support.models.small_weights import tiny_config, tiny_weights

SMALL: dict[str, Any] = {"planner__candidates": 4, "planner__mode": "q"}


def small_config(**changes: object) -> Config:
    return tiny_config(**SMALL | changes)


def versioned(number: int, epoch: int = 1, config: Config | None = None) -> Weights:
    """Other numbers in each version."""
    version = Version(epoch=epoch, number=number)
    weights = tiny_weights(config or small_config(), seed=number)
    return dataclasses.replace(weights, version=version.packed)


def write(folder: Path, content: bytes, version: Version) -> Pointer:
    path = Path("weights") / f"{version.epoch}-{version.number}.safetensors"
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return Pointer(version=version, sha256=digest, size=len(content), path=str(path))


def publish(coordinator: Coordinator, folder: Path, weights: Weights) -> Pointer:
    pointer = write(folder, to_bytes(weights), Version.unpacked(weights.version))
    assert coordinator.publish("weights", pointer) == Published.OK
    return pointer
