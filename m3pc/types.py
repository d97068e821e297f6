"""What crosses package borders.

B batch, L steps of an episode, T of a piece, S state, A action, E environments.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

LOG_STD_RANGE = (-20.0, 2.0)  # of behaviour policies, as in the SAC that recorded D4RL

X = TypeVar("X")
Y = TypeVar("Y")


class InputError(ValueError):
    """What the user gave cannot be used: what was found, what was expected, what to do."""


class DivergedError(RuntimeError):
    """A loss or gradient is not finite: nothing that follows would mean anything."""


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


class AppendKey(NamedTuple):
    """Which episode this is: a store takes each key once, in the order of its sequence."""

    slot: int  # of the rollout actor, the same after a restart
    incarnation: int  # of the process in the slot; a higher one shuts the lower ones out
    sequence: int  # 0, 1, 2, ... of the incarnation's episodes


class Status(StrEnum):
    """What became of an append. Only the first two promise that the episode is in the store."""

    DURABLE = "durable"  # now
    DUPLICATE = "duplicate"  # since an earlier append with this key
    GAP = "gap"  # one before it is missing: send from `expected` on
    FENCED = "fenced"  # a newer incarnation has the slot, or this one sent too much rubbish: stop
    RETRY_LATER = "retry later"  # no room or time now: send it again
    REJECTED = "rejected"  # never, whatever the number of trials; its sequence number is used up


Durability = Literal["fsync", "os"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    status: Status
    expected: int  # the sequence number that the store takes next from this incarnation
    durability: Durability  # fsync: survives power loss; os: survives the death of any process
    reason: str = ""


class EpisodeSink(Protocol):
    def append(self, key: AppendKey, payload: bytes) -> Ack: ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What E environments ask a planner: their last steps, and the state in which each is now."""

    states: Floats  # [E, T, S] up to now; after it the waypoints of a backward plan, else 0
    actions: Floats  # [E, T, A] before now; else 0
    now: Integers  # [E] position of the current state among the T
    steps: Integers  # [E] absolute step of the current state in its episode
    seeds: Integers  # [E] of the episode's planning: the same answer in whatever company

    def __len__(self) -> int:
        return len(self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a planner answers."""

    actions: Floats  # [E, A], in [-1, 1]
    conditions: Floats  # [E] return that the policy was asked for; NaN where it was asked for none
    utilities: Floats  # [E] mean over candidates by weight; NaN without planning
    effective: Floats  # [E] effective number of candidates, 1 / sum of squared weights
    spread: Floats  # [E] standard deviation of the utilities over candidates
    version: int  # of the weights


class Planner(Protocol):
    def decide(self, window: Window, *, explore: bool = False) -> Decision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBatch(Generic[X]):
    """B single steps, for a critic."""

    states: X  # [B, S]
    actions: X  # [B, A]
    rewards: X  # [B]
    next_states: X  # [B, S]
    terminals: X  # [B] 1 where the task ended the episode with this step
    returns: X  # [B] discounted reward from this step on

    def map(self, fn: Callable[[X], Y]) -> "TransitionBatch[Y]":
        return TransitionBatch(**{f.name: fn(getattr(self, f.name)) for f in fields(self)})
