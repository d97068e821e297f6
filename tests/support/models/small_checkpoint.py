"""Small checkpoints, and ways to change them so that their hashes still fit."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from m3pc.model import checkpoint
from m3pc.model.checkpoint import METADATA, TRAINING, WEIGHTS, Checkpoint
from m3pc.model.weights import Weights, checksum, tensors_digest
from m3pc.types import InputError
from tests.support.models.small_weights import tiny_config, tiny_weights
from tests.support.runs.refusals import sentence

FILES = (METADATA, WEIGHTS, TRAINING)
PROGRESS = {"model_updates": 7, "critic_updates": 3, "data": "/data/hopper", "checksum": "ab" * 32}
CONFIG = tiny_config(
    model__width=8, model__encoder_layers=1, model__expansion=1, critic__width=4, seed=5
)


@cache
def weights(seed: int = 0) -> Weights:
    return tiny_weights(CONFIG, seed=seed, states=2, actions=1, env="Pendulum-v1")


def training(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "model.log_alpha": torch.tensor(-2.3 - seed, dtype=torch.float64),
        "model.exp_avg.embed": torch.randn(3, 4, generator=rng),
        "critic.step.q": torch.tensor(3.0),
    }


def contents(saved: Checkpoint) -> tuple[object, ...]:
    """Everything that was read, the tensors by their bytes."""
    w = saved.weights
    about = (w.version, w.config, w.state_size, w.action_size, w.max_episode_steps, w.env)
    return *about, tensors_digest(w.tensors), tensors_digest(saved.training), dict(saved.progress)


def write_one(path: Path) -> Path:
    checkpoint.write(path, weights(), training(), PROGRESS)
    return path


def add(folder: Path, seed: int, keep: int = 2, number: int | None = None) -> Path:
    """The checkpoint numbered ten times `seed`, or as it is said."""
    progress = PROGRESS | {"model_updates": seed}
    return checkpoint.write_next(
        folder,
        weights(seed),
        training(seed),
        progress,
        number=10 * seed if number is None else number,
        keep=keep,
    )


@cache
def expected(seed: int) -> tuple[object, ...]:
    w = weights(seed)
    about = (w.version, w.config, w.state_size, w.action_size, w.max_episode_steps, w.env)
    progress = PROGRESS | {"model_updates": seed}
    return *about, w.digest, tensors_digest(training(seed)), progress


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        checkpoint.read(path)
    return sentence(refused)


def with_metadata(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads((path / METADATA).read_bytes())
    change(tree)
    (path / METADATA).write_text(json.dumps(tree | {"check": checksum(tree)}))


def with_content(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with_metadata(path, lambda tree: tree["files"].__setitem__(name, entry))


def with_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load((path / WEIGHTS).read_bytes())
    change(tensors)
    with_content(path, WEIGHTS, save(tensors))


def put(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Change a field of metadata.json by its dotted path; an Ellipsis takes it away."""

    def change(tree: dict[str, Any]) -> None:
        *outer, last = name.split("/")
        for part in outer:
            tree = tree[part]
        if value is ...:
            del tree[last]
        else:
            tree[last] = value

    return change


def first(tensors: dict[str, Tensor]) -> str:
    return next(name for name in sorted(tensors) if name.startswith("model."))


def poke(value: float) -> Callable[[dict[str, Tensor]], None]:
    """One number of one tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[first(tensors)].view(-1)[-1] = value

    return change
