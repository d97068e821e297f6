"""Babbling: random actions, each held for a while. What a body can do is seen, and no skill.

Episodes differ in how strong actions are and in how long they are held, so that calm ones are there
and wild ones. A action.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3pc.types import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomHoldSchedule:
    """Who plays the episodes of a babbled set, each from its own initial state."""

    actions: int  # A
    patience: int = 200  # steps of an episode, unless the environment ends it before
    longest: float  # steps that actions are held in an episode, on average, at most; 1 or more
    strongest: float = 1.0  # what is asked of a number of an action in the strongest episode
    noise: float = 0.1  # standard deviation of what is added to each number at each step
    round: int = 1

    def start(self, number: int) -> int:
        return number

    def player(self, number: int, rng: np.random.Generator) -> "RandomHoldPolicy":
        return RandomHoldPolicy(
            babble=self,
            strength=rng.uniform(0, self.strongest),
            held=math.exp(rng.uniform(0, math.log(self.longest))),
            action=np.zeros(self.actions),
        )

    def numbers(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "round"}


@dataclass(slots=True, kw_only=True)
class RandomHoldPolicy:
    """One episode of it."""

    babble: RandomHoldSchedule
    strength: float  # the most that is asked of any number of an action
    held: float  # steps on average
    action: NDArray[np.float64]  # [A] which is held
    left: int = 0  # steps for which it is still held
    elapsed: int = 0  # steps

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        assert rng is not None, "babbling needs randomness"
        if self.left == 0:
            self.action = self.strength * rng.uniform(-1, 1, self.babble.actions)
            self.left = int(rng.geometric(1 / self.held))
        self.left -= 1
        self.elapsed += 1
        disturbance = self.babble.noise * rng.standard_normal(self.babble.actions)
        return (self.action + disturbance).clip(-1, 1).astype(np.float32)

    def stops(self) -> bool:
        return self.elapsed >= self.babble.patience
