"""What crosses package borders.

B batch, L steps of an episode, T of a piece, S state, A action, E environments.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

EPOCH_SHIFT = 40  # bits of a version's number: 10^12 updates
EPOCH_BITS = 63 - EPOCH_SHIFT  # what an int64 leaves for its epoch

LOG_STD_RANGE = (-20.0, 2.0)  # of behaviour policies, as in the SAC that recorded D4RL

X = TypeVar("X")
Y = TypeVar("Y")


class InputError(ValueError):
    """What the user gave cannot be used: what was found, what was expected, what to do."""


class DivergedError(RuntimeError):
    """A loss or gradient is not finite: nothing that follows would mean anything."""


class FencedError(RuntimeError):
    """A newer process has the same part: whoever is told so stops."""


class StoreUnavailableError(RuntimeError):
    """No answer of the store within the deadline: ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One trajectory, whole. Neither terminated nor truncated means that it was cut short."""

    states: Floats  # [L + 1, S], the last one is where the episode ended
    actions: Floats  # [L, A], in [-1, 1]
    rewards: Floats  # [L]
    terminated: bool  # the task ended it: nothing follows the last state
    truncated: bool  # the clock ended it: the last state could have gone on
    seed: int = -1  # of the environment's reset; -1 where nobody knows
    version: int = -1  # of the policy at the first step (`Version.packed`); -1 where it has none
    last_version: int = -1  # of the policy at the last step
    target_return: float = math.nan  # return asked for at the first step; NaN where none was
    utility: float = math.nan  # mean over the steps; NaN without planning

    def __len__(self) -> int:
        return len(self.rewards)


class AppendKey(NamedTuple):
    """Which episode this is: a store takes each key once, in the order of its sequence."""

    slot: int  # of the rollout actor, the same after a restart
    incarnation: int  # of the process in the slot; a higher one shuts the lower ones out
    sequence: int  # 0, 1, 2, ... of the incarnation's episodes


class AckStatus(StrEnum):
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
    status: AckStatus
    expected: int  # the sequence number that the store takes next from this incarnation
    durability: Durability  # fsync: survives power loss; os: survives the death of any process
    reason: str = ""


class EpisodeSink(Protocol):
    def append(self, key: AppendKey, payload: bytes) -> Ack: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBatch(Generic[X]):
    """B pieces of T steps cut from episodes: numpy on the wire, tensors on a device."""

    states: X  # [B, T, S]
    actions: X  # [B, T, A]
    rewards: X  # [B, T]
    returns: X  # [B, T] reward still to come
    steps: X  # [B] absolute step of the first of the T

    def map(self, fn: Callable[[X], Y]) -> "WindowBatch[Y]":
        return WindowBatch(**{f.name: fn(getattr(self, f.name)) for f in fields(self)})


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
    target_returns: (
        Floats  # [E] return that the policy was asked for; NaN where it was asked for none
    )
    utilities: Floats  # [E] mean over candidates by weight; NaN without planning
    effective_candidates: Floats  # [E] effective number of candidates, 1 / sum of squared weights
    utility_std: Floats  # [E] standard deviation of the utilities over candidates
    version: int  # of the weights


class Planner(Protocol):
    def decide(self, window: Window, *, explore: bool = False) -> Decision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request to a planner server: what it answers is a Decision, or a Refusal."""

    window: Window
    mode: str | None = None  # one of `config.MODES`; None: as the weights are configured
    ratio: float | None = None  # times the best return; None: as the weights are configured
    target_remaining: float | None = None  # reward that is still wanted, instead of any ratio
    explore: bool = False
    mean: bool = False  # take the mean, of mode rcbc the median; else as the weights are configured
    candidates: int | None = None  # plans to weigh; None: as the weights are configured


class RejectReason(StrEnum):
    RETRY_LATER = "retry"  # too many wait already: ask again
    LATE = "late"  # its deadline passed before it was computed: ask again
    BAD = "bad"  # never, whatever the number of trials
    FAILED = "failed"  # the planner's own fault: ask again, perhaps another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    why: RejectReason
    reason: str
    wait: float = 0.0  # seconds before it makes sense to ask again


class PlannerGoneError(RuntimeError):
    """No planner answered for as long as was waited, or waiting was given up."""


class PendingDecision(Protocol):
    """A request that is being answered; it repeats itself where that helps."""

    def result(self, patience: float, stop: Callable[[], bool]) -> Decision:
        """PlannerGoneError after `patience` seconds, or once `stop` says so."""


class PlannerEndpoint(Protocol):
    """A planner elsewhere: asking does not wait."""

    def ask(self, ask: PlanRequest) -> PendingDecision: ...


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


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """Of published weights: first by the learner's start, then by its count."""

    epoch: int  # from `new_epoch`; 0 for what was learnt offline
    number: int  # updates of the model in this run

    def __str__(self) -> str:
        return f"{self.epoch}-{self.number}"

    @property
    def packed(self) -> int:
        """One number that an episode carries, in the same order; an int64 holds it."""
        if not (0 <= self.epoch < 1 << EPOCH_BITS and 0 <= self.number < 1 << EPOCH_SHIFT):
            raise InputError(
                f"version {self} does not fit 64 bits: expected an epoch below "
                f"2^{EPOCH_BITS} and a number below 2^{EPOCH_SHIFT}; start a new run"
            )
        return self.epoch << EPOCH_SHIFT | self.number

    @classmethod
    def unpacked(cls, packed: int) -> "Version":
        return cls(epoch=packed >> EPOCH_SHIFT, number=packed & ((1 << EPOCH_SHIFT) - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Which file is the newest; its reader checks size and hash."""

    version: Version
    sha256: str
    size: int  # bytes
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to do something alone until `seconds` passed unrenewed.

    A holder that was stopped does not notice the end of it: whatever it writes to must refuse a
    fencing number below the highest it has seen.
    """

    name: str
    holder: str
    fencing: int  # greater at each grant of this name
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    slot: int
    incarnation: int
    age: float  # seconds since the last heartbeat or registration, on the coordinator's clock


class Published(Enum):
    OK = "ok"
    STALE = "stale"  # not beyond the newest of its epoch
    FENCED = "fenced"  # a newer epoch has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredState:
    """What the disk knows of a run: the least that a coordinator may believe after a loss."""

    incarnations: Mapping[int, int] = field(default_factory=dict)  # by slot
    epochs: Mapping[str, int] = field(default_factory=dict)  # by pointer
    pointers: Mapping[str, Pointer] = field(default_factory=dict)
    fencings: Mapping[str, int] = field(default_factory=dict)  # by lease


class CoordinatorUnavailableError(RuntimeError):
    """No answer within the deadline: go on with what is known, publish and register nothing."""


class Coordinator(Protocol):
    """Who is who, and what is newest. Every call ends within a deadline or raises
    CoordinatorUnavailableError; every call may be repeated."""

    def register(self, slot: int) -> int:
        """A new incarnation of a slot: greater than all before it, never given twice."""

    def heartbeat(self, slot: int, incarnation: int) -> bool:
        """False once a newer incarnation exists: stop."""

    def members(self) -> list[Member]:
        """Every slot that ever registered, by number."""

    def lease(self, name: str, holder: str, seconds: float) -> Lease | None:
        """None while another holds it. Who holds it already is granted it anew."""

    def renew(self, lease: Lease) -> Lease | None:
        """None once it ran out, was released or was granted anew."""

    def release(self, lease: Lease) -> None: ...

    def new_epoch(self, name: str) -> int:
        """A learner starts: all versions of earlier epochs are fenced from now on."""

    def publish(self, name: str, pointer: Pointer) -> Published:
        """Move a pointer forwards. The very same pointer again is OK."""

    def read(self, name: str) -> Pointer | None: ...

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None:
        """The pointer once it is beyond `since`; None after `timeout` seconds."""

    def close(self) -> None: ...
