"""A live store for tests: episodes in memory, in segments of any size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m3pc.types import AppendKey, Episode, Integers
from replay.format.segment import Segment, concatenated, segment_of
from replay.store.view import EpisodeMask
from tests.support.episodes.episodes import numbered


class LiveStore:
    """A store that can grow, be sealed and drop its oldest segment."""

    def __init__(self, *parts: Sequence[Episode]) -> None:
        self._segments = [segment(part) for part in parts]
        self._withdrawn: set[int] = set()
        self._now = self._snapshot()

    def view(self) -> "LiveView":
        return self._now

    def append(self, *episodes: Episode) -> None:
        """As a small segment in memory."""
        self._segments.append(segment(episodes))
        self._now = self._snapshot()

    def seal(self, first: int) -> None:
        """Merge the segments from number `first` on."""
        self._segments[first:] = [merged(self._segments[first:])]
        self._now = self._snapshot()

    def drop(self) -> None:
        gone = len(self._segments.pop(0).lengths)
        self._withdrawn = {number - gone for number in self._withdrawn if number >= gone}
        self._now = self._snapshot()

    def withdraw(self, *numbers: int) -> None:
        self._withdrawn |= set(numbers)
        self._now = self._snapshot()

    def _snapshot(self) -> "LiveView":
        count = sum(len(part.lengths) for part in self._segments)
        mask = np.array([number in self._withdrawn for number in range(count)], np.bool_)
        return LiveView(self, tuple(self._segments), mask if self._withdrawn else None)


@dataclass(frozen=True, slots=True, eq=False)
class LiveView:
    store: LiveStore
    segments: tuple[Segment, ...]
    withdrawn: EpisodeMask | None = None

    @property
    def path(self) -> Path:
        return Path("live")

    @property
    def lengths(self) -> Integers:
        return np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in self.segments)])

    @property
    def episode_returns(self) -> NDArray[np.float64]:
        return np.concatenate([np.zeros(0), *(part.episode_returns for part in self.segments)])

    def latest(self) -> "LiveView":
        return self.store.view()


def live(lengths: Iterable[int], *, cut: int = 1, first: int = 0) -> LiveStore:
    """Episodes `first`, `first` + 1, ... of these lengths, `cut` to a segment."""
    episodes = [numbered(first + number, length) for number, length in enumerate(lengths)]
    return LiveStore(*(episodes[low : low + cut] for low in range(0, len(episodes), cut)))


def segment(episodes: Sequence[Episode]) -> Segment:
    return segment_of(episodes, [AppendKey(0, 0, number) for number in range(len(episodes))])


def merged(parts: Sequence[Segment]) -> Segment:
    return reduce(concatenated, parts)
