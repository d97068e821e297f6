"""What crosses package borders. B batch, L steps of an episode, T of a piece, S state, A action."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LOG_STD_RANGE = (-20.0, 2.0)  # of behaviour policies, as in the SAC that recorded D4RL

X = TypeVar("X")
Y = TypeVar("Y")


class InputError(ValueError):
    """What the user gave cannot be used: what was found, what was expected, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One trajectory, whole. Neither terminated nor truncated means that it was cut short."""

    states: Floats  # [L + 1, S], the last one is where the episode ended
    actions: Floats  # [L, A], in [-1, 1]
    rewards: Floats  # [L]
    terminated: bool  # the task ended it: nothing follows the last state
    truncated: bool  # the clock ended it: the last state could have gone on
    seed: int = -1  # of the environment's reset; -1 where nobody knows
    version: int = -1  # of the policy that acted; -1 where it has none

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBatch(Generic[X]):
    """B pieces of T steps cut from episodes: numpy on the wire, tensors on a device."""

    states: X  # [B, T, S]
    actions: X  # [B, T, A]
    rewards: X  # [B, T]
    returns: X  # [B, T] reward still to come
    steps: X  # [B] absolute step of the first of the T

    def map(self, fn: Callable[[X], Y]) -> "SegmentBatch[Y]":
        return SegmentBatch(**{f.name: fn(getattr(self, f.name)) for f in fields(self)})
