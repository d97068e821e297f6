"""Counts the model updates that a run's episodes call for, in integers: no rounding.

An episode of L steps calls for updates_per_step * L + updates_per_episode updates. With
updates_per_step = a / D it inserts a * L + D * updates_per_episode units; D units are one update.
"""

from dataclasses import dataclass
from fractions import Fraction

from m3pc.config.schema import OnlineConfig
from m3pc.types import InputError
from replay.server.sample_ratio import FINEST, RateLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSchedule:
    updates_per_step: float
    updates_per_episode: int
    max_episode_steps: int
    slack: int  # extra steps that collecting may run ahead of learning

    def __post_init__(self) -> None:
        if not self.units(self.max_episode_steps):
            raise InputError(
                f"{self.updates_per_step} updates per step and {self.updates_per_episode} per "
                f"episode; give at least one of them above 0 (a millionth per step or more)"
            )

    def units(self, steps: int, episodes: int = 1) -> int:
        """Units that `steps` in `episodes` insert."""
        ratio = self._ratio
        return steps * ratio.numerator + episodes * self.updates_per_episode * ratio.denominator

    def limits(self) -> RateLimits:
        """A sample is one update. The learner never does more updates than are owed, so a run that
        has caught up has done as many as in lock-step; only collecting may run ahead."""
        longest, unit = self.units(self.max_episode_steps), Fraction(1, self._ratio.denominator)
        owed = longest * unit
        return RateLimits(
            samples_per_insert=unit,
            batch=1,
            max_insert=longest,
            min_size=0,
            min_diff=Fraction(0),
            max_diff=1 + owed + self.slack * owed / self.max_episode_steps,
        )

    def owed(self, steps: int, episodes: int) -> int:
        """Updates owed after `steps` in `episodes`."""
        return self.units(steps, episodes) // self._ratio.denominator

    @property
    def _ratio(self) -> Fraction:
        return Fraction(self.updates_per_step).limit_denominator(FINEST)


def schedule_of(online: OnlineConfig, max_episode_steps: int) -> UpdateSchedule:
    return UpdateSchedule(
        updates_per_step=online.updates_per_step,
        updates_per_episode=online.updates_per_episode,
        max_episode_steps=max_episode_steps,
        slack=online.slack,
    )
