"""The episodes of a store at one moment, in the order in which they came. E episodes."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from m3pc.types import Integers
from replay.format.segment import Segment

EpisodeMask = NDArray[np.bool_]


class StoreView(Protocol):
    """Immutable. A `Store` is one, closed or live; without an episode, `segments` is ()."""

    @property
    def path(self) -> Path: ...

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Mapped where they are sealed; the newest episodes may be small segments in memory, but
        few: a batch costs some microseconds for each that it touches."""

    @property
    def lengths(self) -> Integers: ...  # [E]

    @property
    def episode_returns(self) -> NDArray[np.float64]: ...  # [E]

    @property
    def withdrawn(self) -> EpisodeMask | None:
        """[E] True where an operator withdrew the episode: it is never drawn. None: nowhere."""

    def later(self) -> "StoreView":
        """The same store as it is now: oldest episodes may be gone, new ones come last. A segment
        that did not change is the same object in both views; a store that did not, the same view.
        Any thread may ask.
        """


class JoinedView:
    """Two views as one: the episodes of `first`, then those of `second`."""

    def __init__(self, first: StoreView, second: StoreView) -> None:
        self.first, self.second = first, second
        self.segments = (*first.segments, *second.segments)
        self.lengths: Integers = np.concatenate([first.lengths, second.lengths])
        self.episode_returns = np.concatenate([first.episode_returns, second.episode_returns])
        self.withdrawn: EpisodeMask | None = ~np.concatenate([drawable(first), drawable(second)])

    @property
    def path(self) -> Path:
        return self.first.path

    def later(self) -> "JoinedView":
        first, second = self.first.later(), self.second.later()
        same = first is self.first and second is self.second
        return self if same else JoinedView(first, second)


class FirstEpisodes:
    """The first `count()` episodes of a view; later ones are as if they had been withdrawn."""

    def __init__(self, view: StoreView, count: Callable[[], int]) -> None:
        self._view, self._count = view, count
        self.path, self.segments = view.path, view.segments
        self.lengths, self.episode_returns = view.lengths, view.episode_returns
        self._limit = count()
        beyond = np.arange(len(view.lengths)) >= self._limit
        self.withdrawn: EpisodeMask | None = beyond | ~drawable(view)

    def later(self) -> "FirstEpisodes":
        view = self._view.later()
        same = view is self._view and self._count() == self._limit
        return self if same else FirstEpisodes(view, self._count)


def drawable(view: StoreView) -> EpisodeMask:
    """[E] False where the episode was withdrawn."""
    withdrawn = view.withdrawn
    return np.ones(len(view.lengths), np.bool_) if withdrawn is None else ~withdrawn
