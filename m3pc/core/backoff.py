"""Exponential back-off: how long to wait before the next attempt."""

from dataclasses import dataclass
from typing import Protocol


class UniformSource(Protocol):
    """A `random.Random` or a `numpy.random.Generator`."""

    def uniform(self, a: float, b: float, /) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses in seconds: `first` after one failure, then doubled each time, at most `longest`."""

    first: float
    longest: float

    def pause(self, failures: int) -> float:
        """The pause after that many failures in a row (from 1 on)."""
        return min(self.first * 2.0 ** min(failures - 1, 60), self.longest)

    def jittered(self, failures: int, rng: UniformSource, *, at_least: float = 0.0) -> float:
        """`pause` times a random factor from `at_least` to 1, so that clients that failed together
        do not return together."""
        return self.pause(failures) * rng.uniform(at_least, 1.0)
