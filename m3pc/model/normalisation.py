"""Normalisation of the model's inputs: states, rewards and returns by mean and std, actions not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from m3pc.types import Floats


class Tokens(NamedTuple):
    """The four modalities, normalised, in the order of `masks.MODALITIES`."""

    states: Tensor  # [B, T, S]
    actions: Tensor  # [B, T, A]
    rewards: Tensor  # [B, T, 1]
    returns: Tensor  # [B, T, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An affine map of one modality."""

    mean: Tensor  # [dim]
    std: Tensor  # [dim]

    def encode(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def decode(self, y: Tensor) -> Tensor:
        return y * self.std + self.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    states: Scale
    rewards: Scale
    returns: Scale

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Floats], device: str = "cpu") -> "Normaliser":
        """`arrays` holds `states.mean`, `states.std`, `rewards.mean`, ..."""

        def scale(name: str) -> Scale:
            mean, std = (torch.as_tensor(arrays[f"{name}.{part}"]) for part in ("mean", "std"))
            return Scale(mean=mean.to(device), std=std.to(device))

        return cls(states=scale("states"), rewards=scale("rewards"), returns=scale("returns"))
