"""All that a plan needs, as one object: what a learner publishes."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from m3pc.config import Config
from m3pc.critic import Critic
from m3pc.model import TrajectoryModel
from m3pc.tokens import Normaliser
from m3pc.types import Floats, InputError

M = TypeVar("M", bound=nn.Module)

SCALES = [f"{name}.{part}" for name in ("states", "rewards", "returns") for part in ("mean", "std")]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Model, critic, normaliser, return envelope and step limit that belong together."""

    version: int  # updates behind the model and the critic
    config: Config
    state_size: int
    action_size: int
    horizon: int  # H, the environment's step limit
    env: str | None  # what the data came from
    tensors: Mapping[str, Tensor]  # model.*, critic.*, normaliser.*, envelope [H], return_range [2]

    def __post_init__(self) -> None:
        """Refuse tensors that are missing, unknown, of another shape, not finite or no scale."""
        expected = self._shapes()
        missing, unknown = (
            sorted(set(expected) - set(self.tensors)),
            sorted(set(self.tensors) - set(expected)),
        )
        if missing or unknown:
            raise InputError(f"weights lack {missing[:3]} and have unknown {unknown[:3]}")
        for name, tensor in self.tensors.items():
            if tensor.shape != expected[name] or tensor.dtype != torch.float32:
                raise InputError(
                    f"weights: {name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected float32 {list(expected[name])}"
                )
            if not tensor.isfinite().all():
                raise InputError(f"weights: {name} holds NaN or Inf")
            if name.endswith((".std", ".state_std")) and not (tensor > 0).all():
                raise InputError(f"weights: {name} holds numbers that are not above 0")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of every tensor's name and numbers; the settings are not in it."""
        return tensors_digest(self.tensors)

    def model(self, device: str = "cpu") -> TrajectoryModel:
        """The trajectory model, ready to predict."""
        model = TrajectoryModel(self.config.model, self.state_size, self.action_size)
        return _filled(model, part(self.tensors, "model."), device)

    def critic(self, device: str = "cpu") -> Critic:
        critic = Critic(self.config.critic, self.state_size, self.action_size)
        return _filled(critic, part(self.tensors, "critic."), device)

    def normaliser(self, device: str = "cpu") -> Normaliser:
        arrays = {name: x.numpy() for name, x in part(self.tensors, "normaliser.").items()}
        return Normaliser.from_arrays(arrays, device)

    @property
    def envelope(self) -> Floats:
        """Best return at each step: what a policy is asked for. [H]"""
        return np.asarray(self.tensors["envelope"])

    @property
    def return_range(self) -> Floats:
        return np.asarray(self.tensors["return_range"])

    def _shapes(self) -> dict[str, torch.Size]:
        with torch.device("meta"):
            parts: dict[str, nn.Module] = {
                "model": TrajectoryModel(self.config.model, self.state_size, self.action_size),
                "critic": Critic(self.config.critic, self.state_size, self.action_size),
            }
        shapes = {
            f"{owner}.{name}": tensor.shape
            for owner, module in parts.items()
            for name, tensor in module.state_dict().items()
        }
        sizes = {"states": self.state_size}
        scales = {f"normaliser.{n}": torch.Size([sizes.get(n.split(".")[0], 1)]) for n in SCALES}
        rest = {"envelope": torch.Size([self.horizon]), "return_range": torch.Size([2])}
        return shapes | scales | rest


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def gather(
    model: TrajectoryModel,
    critic: Critic,
    *,
    arrays: Mapping[str, Floats],
    envelope: Floats,
    return_range: Floats,
) -> dict[str, Tensor]:
    """The tensors of Weights, copied out of what is being trained."""
    named = {
        **{f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        **{f"critic.{name}": tensor for name, tensor in critic.state_dict().items()},
        **{f"normaliser.{name}": torch.from_numpy(array) for name, array in arrays.items()},
        "envelope": torch.from_numpy(envelope),
        "return_range": torch.from_numpy(return_range),
    }
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named.items()}


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _filled(module: M, state: Mapping[str, Tensor], device: str) -> M:
    module.load_state_dict(dict(state))
    return module.to(device).eval()
