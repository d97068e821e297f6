"""Records, protocols and errors that several packages share.

B batch size, L steps of an episode, T steps of a window, S state size, A action size,
E environments.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

EPOCH_SHIFT = 40  # low bits of a packed version: its number, up to 10^12 updates
EPOCH_BITS = 63 - EPOCH_SHIFT  # high bits of a non-negative int64: its epoch

LOG_STD_RANGE = (-20.0, 2.0)  # behaviour policies, as in the SAC that recorded D4RL's data

X = TypeVar("X")
Y = TypeVar("Y")


class InputError(ValueError):
    """The user's input cannot be used. Says what was found, what was expected, what to do."""


class DivergedError(RuntimeError):
    """A loss or gradient is not finite; training cannot go on from here."""


class FencedError(RuntimeError):
    """A newer process has taken over this one's role; this one has to stop."""


class StoreUnavailableError(RuntimeError):
    """The store did not answer within the deadline; the call may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A complete episode. If neither terminated nor truncated, it was cut short."""

    states: Floats  # [L + 1, S]; the last one is the state in which the episode ended
    actions: Floats  # [L, A], in [-1, 1]
    rewards: Floats  # [L]
    terminated: bool  # the task ended it: no reward follows the last state
    truncated: bool  # its step limit ended it: the last state could have continued
    seed: int = -1  # the environment's reset seed; -1 if unknown
    version: int = -1  # weights at the first step (`Version.packed`); -1 without a model
    last_version: int = -1  # weights at the last step
    target_return: float = math.nan  # target of the policy at the first step; NaN without one
    utility: float = math.nan  # mean over the steps; NaN without planning

    def __len__(self) -> int:
        return len(self.rewards)


class AppendKey(NamedTuple):
    """Identifies an episode: a store accepts each key once, in the order of its sequence."""

    slot: int  # the rollout actor's number, which a restart keeps
    incarnation: int  # counts processes in the slot; a higher one fences lower ones
    sequence: int  # numbers the incarnation's episodes: 0, 1, 2, ...


class AckStatus(StrEnum):
    """The result of an append. Only the first two promise that the episode is in the store."""

    DURABLE = "durable"  # it has been stored
    DUPLICATE = "duplicate"  # an earlier append with this key has stored it
    GAP = "gap"  # an earlier episode is missing: send from `expected` on
    FENCED = "fenced"  # a newer incarnation has the slot, or this one sent too much invalid data
    RETRY_LATER = "retry later"  # no space or time now: send it again
    REJECTED = "rejected"  # the payload is invalid; its sequence number is used up


Durability = Literal["fsync", "os"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """A store's answer to an append."""

    status: AckStatus
    expected: int  # the sequence number that the store accepts next from this incarnation
    durability: Durability  # fsync: survives power loss; os: survives the end of any process
    reason: str = ""


class EpisodeSink(Protocol):
    """Where finished episodes go: a store, or a client of one."""

    def append(self, key: AppendKey, payload: bytes) -> Ack: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBatch(Generic[X]):
    """B windows of T consecutive steps of episodes: numpy arrays, or tensors on a device."""

    states: X  # [B, T, S]
    actions: X  # [B, T, A]
    rewards: X  # [B, T]
    returns: X  # [B, T] return-to-go
    steps: X  # [B] position of the window's first step in its episode

    def map(self, fn: Callable[[X], Y]) -> "WindowBatch[Y]":
        return WindowBatch(**{f.name: fn(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Input of a planner for E environments: their last steps and their current states."""

    states: Floats  # [E, T, S] up to `now`; after it the waypoints of a backward plan, else 0
    actions: Floats  # [E, T, A] before `now`, else 0
    now: Integers  # [E] position of the current state in the window
    steps: Integers  # [E] position of the current state in its episode
    seeds: Integers  # [E] the episode's planning seed, so that rows are independent

    def __len__(self) -> int:
        return len(self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A planner's answer for E environments."""

    actions: Floats  # [E, A], in [-1, 1]
    target_returns: Floats  # [E] return that the policy was conditioned on; NaN without one
    utilities: Floats  # [E] weighted mean over the candidates; NaN without planning
    effective_candidates: Floats  # [E] 1 / sum of squared weights; NaN without planning
    utility_std: Floats  # [E] standard deviation over the candidates; NaN without planning
    version: int  # version of the weights (`Version.packed`)


class PlannerSizes(Protocol):
    """The lengths that a planner works with."""

    @property
    def window(self) -> int:
        """T, the steps of a window."""

    @property
    def horizon(self) -> int:
        """Steps that the planner imagines; the other T - horizon show the past."""


class Planner(PlannerSizes, Protocol):
    """Chooses actions. `decide` waits if they are computed in another process."""

    def decide(self, window: Window, *, explore: bool = False) -> Decision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request to a planner server, which answers with a Decision or a Rejection.

    None means: as configured.
    """

    window: Window
    mode: str | None = None  # one of `m3pc.config.schema.MODES`
    ratio: float | None = None  # factor on the configured target return
    target_remaining: float | None = None  # sum of rewards still to reach, instead of a ratio
    explore: bool = False
    mean: bool = False  # act by the mean (in mode rcbc the median), whatever is configured
    candidates: int | None = None  # plans to weight


class RejectReason(StrEnum):
    """Why a planner server gives no decision. All but BAD may be retried."""

    RETRY_LATER = "retry"  # its queue is full
    LATE = "late"  # the deadline passed before the decision was computed
    BAD = "bad"  # the request is invalid
    FAILED = "failed"  # this planner has an error; another planner may succeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A planner server's answer in place of a decision."""

    why: RejectReason
    reason: str  # for people
    wait: float = 0.0  # seconds after which to retry


class PlannerGoneError(RuntimeError):
    """No planner answered in time, or the caller stopped waiting."""


class PendingDecision(Protocol):
    """An open request, which is retried where that helps."""

    def result(self, patience: float, stop: Callable[[], bool]) -> Decision:
        """Wait for the decision. PlannerGoneError after `patience` seconds, or once `stop()`."""


class PlannerEndpoint(PlannerSizes, Protocol):
    """A planner in another process."""

    def ask(self, request: PlanRequest) -> PendingDecision:
        """Send a request, without waiting for its decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBatch(Generic[X]):
    """B single steps, for a critic."""

    states: X  # [B, S]
    actions: X  # [B, A]
    rewards: X  # [B]
    next_states: X  # [B, S]
    terminals: X  # [B] 1 where the task ended the episode at this step
    returns: X  # [B] discounted sum of rewards from this step on

    def map(self, fn: Callable[[X], Y]) -> "TransitionBatch[Y]":
        return TransitionBatch(**{f.name: fn(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """Version of weights, ordered by the learner's start, then by its count of updates."""

    epoch: int  # the publishing learner's, from `new_epoch`; 0 in checkpoints
    number: int  # updates done in this run

    def __str__(self) -> str:
        return f"{self.epoch}-{self.number}"

    @property
    def packed(self) -> int:
        """Both parts in one non-negative int64 with the same order, as episodes store it."""
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
    """Names the file of the newest weights. Its reader checks size and hash."""

    version: Version
    sha256: str  # in hexadecimal digits
    size: int  # bytes
    path: str  # relative to the run's folder


class Published(Enum):
    """The result of publishing a pointer."""

    OK = "ok"
    STALE = "stale"  # not newer than the newest of its epoch
    FENCED = "fenced"  # a newer epoch has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredState:
    """A run's state read from disk, for a coordinator that lost its records."""

    incarnations: Mapping[int, int] = field(default_factory=dict)  # by slot
    pointers: Mapping[str, Pointer] = field(default_factory=dict)


class CoordinatorUnavailableError(RuntimeError):
    """The coordinator did not answer in time. Callers go on, but publish and register nothing."""


class Coordinator(Protocol):
    """Gives out incarnations of actors and epochs of learners, and knows the newest weights.

    Every call ends within a deadline or raises CoordinatorUnavailableError, and may be repeated.
    """

    def register(self, slot: int) -> int:
        """A new incarnation of a slot: greater than all before it, never given out twice."""

    def heartbeat(self, slot: int, incarnation: int) -> bool:
        """False once a newer incarnation exists: the caller has to stop."""

    def new_epoch(self, name: str) -> int:
        """A new epoch of a pointer: from now on, pointers of earlier epochs are fenced."""

    def publish(self, name: str, pointer: Pointer) -> Published:
        """Move a pointer forward. Publishing the same pointer again is OK."""

    def read(self, name: str) -> Pointer | None:
        """The newest pointer of this name."""

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None:
        """The pointer once it is newer than `since`; None after `timeout` seconds."""

    def close(self) -> None: ...
