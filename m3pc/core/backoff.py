"""Exponential back-off: how long to wait before the next attempt."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses in seconds: `first` after one failure, then doubled each time, at most `longest`."""

    first: float
    longest: float

    def pause(self, failures: int) -> float:
        """After that many failures in a row (from 1 on)."""
        return float(min(self.first * 2.0 ** min(failures - 1, 60), self.longest))

    def jittered(self, failures: int, rng: np.random.Generator, *, at_least: float = 0.0) -> float:
        """A random part, from `at_least` to all, of that pause: clients that failed together do
        not come back together."""
        return self.pause(failures) * float(rng.uniform(at_least, 1.0))
