"""Random-hold policies: random actions, each held for some steps. A numbers in an action.

Episodes differ in strength and in mean hold time, so a data set has calm and wild episodes. They
show what a body can do without any skill.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3pc.types import Floats

# Keys of a data set's header: field of the schedule.
KEYS = {
    "actions": "actions",
    "patience": "max_steps",
    "longest": "max_hold",
    "strongest": "max_strength",
    "noise": "noise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomHoldSchedule:
    """Draws a random-hold policy for each episode; each has an initial state of its own."""

    actions: int  # A
    max_steps: int = 200  # per episode, unless the environment ends it earlier
    max_hold: float  # upper bound of an episode's mean hold time, in steps; at least 1
    max_strength: float = 1.0  # upper bound of an episode's strength
    noise: float = 0.1  # standard deviation of the noise on each number of an action, per step
    episodes_per_round: int = 1

    def initial_state(self, number: int) -> int:
        return number

    def policy_of(self, number: int, rng: np.random.Generator) -> "RandomHoldPolicy":
        return RandomHoldPolicy(
            schedule=self,
            strength=rng.uniform(0, self.max_strength),
            mean_hold=math.exp(rng.uniform(0, math.log(self.max_hold))),
            action=np.zeros(self.actions),
        )

    def metadata(self) -> dict[str, Any]:
        """The settings, for a data set's header."""
        settings = asdict(self)
        return {key: settings[name] for key, name in KEYS.items()}


@dataclass(slots=True, kw_only=True)
class RandomHoldPolicy:
    """Random actions of one episode."""

    schedule: RandomHoldSchedule
    strength: float  # largest magnitude of any number of an action, before noise
    mean_hold: float  # steps
    action: NDArray[np.float64]  # [A] the action that is held
    hold_left: int = 0  # steps
    elapsed: int = 0  # steps

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        assert rng is not None, "random actions need a generator"
        if self.hold_left == 0:
            self.action = self.strength * rng.uniform(-1, 1, self.schedule.actions)
            self.hold_left = int(rng.geometric(1 / self.mean_hold))
        self.hold_left -= 1
        self.elapsed += 1
        noise = self.schedule.noise * rng.standard_normal(self.schedule.actions)
        return (self.action + noise).clip(-1, 1).astype(np.float32)

    def stops(self) -> bool:
        return self.elapsed >= self.schedule.max_steps
