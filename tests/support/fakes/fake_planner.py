"""A planner without a model: its answer for a row depends on that row only."""

import math
from collections.abc import Iterator
from itertools import repeat

import numpy as np

from m3pc.types import Decision, Floats, Window


class FakePlanner:
    """Remembers its windows. Its decisions have the versions that it was given, one a call."""

    window, horizon = 8, 4

    def __init__(self, actions: int, versions: Iterator[int] | None = None) -> None:
        self._size = actions
        self._versions = versions or repeat(3)
        self.asked: list[Window] = []
        self.explored: list[bool] = []

    def decide(self, window: Window, *, explore: bool = False) -> Decision:
        self.asked.append(window)
        self.explored.append(explore)
        states = window.states[np.arange(len(window)), window.now]
        rows = zip(states, window.seeds, window.steps, strict=True)
        return Decision(
            actions=np.stack([self.act(state, int(seed), int(step)) for state, seed, step in rows]),
            target_returns=(100 - window.steps).astype(np.float32),
            utilities=(window.seeds % 97).astype(np.float32),
            effective_candidates=np.full(len(window), 2, np.float32),
            utility_std=np.full(len(window), np.nan, np.float32),
            version=next(self._versions),
        )

    def act(self, state: Floats, seed: int, step: int) -> Floats:
        waves = [math.sin(float(state[0]) + seed % 97 + step + i) for i in range(self._size)]
        return np.array(waves, np.float32)
