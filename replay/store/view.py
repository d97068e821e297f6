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
    """Immutable. A `Store` is a view; without episodes, `segments` is ()."""

    @property
    def path(self) -> Path: ...

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Sealed segments are mapped; the newest episodes are in a few small segments in memory. A
        batch costs some microseconds for each segment that it touches."""

    @property
    def lengths(self) -> Integers: ...  # [E]

    @property
    def episode_returns(self) -> NDArray[np.float64]: ...  # [E]

    @property
    def withdrawn(self) -> EpisodeMask | None:
        """[E] True where an operator withdrew the episode: it is never drawn. None: none is."""

    def latest(self) -> "StoreView":
        """Return the current view: the oldest episodes may be gone, new ones come last. Unchanged
        segments are the same objects; if nothing changed, so is the view. Any thread may call."""


class JoinedView:
    """Logged and collected episodes as one view, in this order."""

    def __init__(self, offline: StoreView, online: StoreView) -> None:
        self.offline, self.online = offline, online
        self.segments = (*offline.segments, *online.segments)
        self.lengths: Integers = np.concatenate([offline.lengths, online.lengths])
        self.episode_returns = np.concatenate([offline.episode_returns, online.episode_returns])
        self.withdrawn: EpisodeMask | None = ~np.concatenate([drawable(offline), drawable(online)])

    @property
    def path(self) -> Path:
        return self.offline.path

    def latest(self) -> "JoinedView":
        first, second = self.offline.latest(), self.online.latest()
        same = first is self.offline and second is self.online
        return self if same else JoinedView(first, second)


class FirstEpisodes:
    """The first `count()` episodes of a view; later ones count as withdrawn."""

    def __init__(self, view: StoreView, count: Callable[[], int]) -> None:
        self._view, self._count = view, count
        self.path, self.segments = view.path, view.segments
        self.lengths, self.episode_returns = view.lengths, view.episode_returns
        self._limit = count()
        beyond = np.arange(len(view.lengths)) >= self._limit
        self.withdrawn: EpisodeMask | None = beyond | ~drawable(view)

    def latest(self) -> "FirstEpisodes":
        view = self._view.latest()
        same = view is self._view and self._count() == self._limit
        return self if same else FirstEpisodes(view, self._count)


def drawable(view: StoreView) -> EpisodeMask:
    """[E] False where the episode was withdrawn."""
    withdrawn = view.withdrawn
    return np.ones(len(view.lengths), np.bool_) if withdrawn is None else ~withdrawn
