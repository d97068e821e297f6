"""Means of the numbers of many updates."""

import math
from collections import defaultdict
from collections.abc import Mapping


class RunningMeans:
    """Means of numbers since the last report. A NaN is left out: that update had no such number."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self.latest: dict[str, float] = {}

    def add(self, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if not math.isnan(value):
                self._values[name].append(value)
                self.latest[name] = value

    def take(self) -> dict[str, float]:
        """Return the means and start anew."""
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        self._values.clear()
        return means
