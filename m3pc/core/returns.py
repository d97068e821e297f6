"""Returns-to-go at every step, for many episodes laid end to end. R rows, E episodes."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from m3pc.types import Floats

StepArray = NDArray[np.int64]


class ReturnSettings(Protocol):
    """The section `returns` of a configuration."""

    @property
    def mode(self) -> str: ...

    @property
    def include_now(self) -> bool: ...

    @property
    def discount(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnRule:
    """How a return-to-go is computed from rewards; each preset has its own rule (ALGORITHM,
    section 13)."""

    max_episode_steps: int  # H, the environment's step limit
    average: bool = True  # divide by the H - t steps that could still follow
    include_now: bool = True  # whether the return at step t contains r_t itself
    discount: float = 1.0

    @classmethod
    def of(cls, settings: ReturnSettings, max_episode_steps: int) -> "ReturnRule":
        return cls(
            max_episode_steps=max_episode_steps,
            average=settings.mode == "average",
            include_now=settings.include_now,
            discount=settings.discount,
        )

    def scale(self, steps: StepArray) -> NDArray[np.float64]:
        """Steps [R] -> factors [R] that turn a sum of rewards into a return, if the sum is spread
        evenly over the steps that could still follow."""
        left = np.maximum(self.max_episode_steps - steps, 1)
        counted = left if self.include_now else left - 1
        weighed = (
            counted.astype(np.float64)
            if self.discount == 1
            else (1 - self.discount**counted) / (1 - self.discount)
        )
        return weighed / left / (left if self.average else 1)


def returns_to_go(rewards: Floats, lengths: StepArray, rule: ReturnRule) -> Floats:
    """[R] rewards of E episodes with `lengths` [E] -> [R] returns, in one reverse pass.

    g_t = r_t + discount * g_{t+1}, taken over all episodes at once from their last steps backwards;
    summed in float64, so that a long episode's early returns are as exact as its late ones.
    """
    ends = np.cumsum(lengths)
    returns = rewards.astype(np.float64)
    order = np.argsort(-lengths, kind="stable")  # the episodes still running are a prefix
    last = ends[order] - 1
    running = np.searchsorted(-lengths[order], -np.arange(1, lengths.max(initial=0)), side="left")
    for back, count in enumerate(running.tolist(), start=1):
        rows = last[:count] - back
        returns[rows] += rule.discount * returns[rows + 1]
    if not rule.include_now:
        # sum over k > t of discount^(k-t-1) r_k is g_{t+1}, and 0 at the last step
        returns = np.append(returns[1:], 0.0)
        returns[ends - 1] = 0.0
    if rule.average:
        returns /= np.maximum(rule.max_episode_steps - steps_within(lengths), 1)
    return returns.astype(np.float32)


def steps_within(lengths: StepArray) -> StepArray:
    """0, 1, 2, ... inside each episode: [E] -> [R]."""
    first = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(first, lengths)
