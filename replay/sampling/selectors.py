"""Which episodes may be drawn, and how often. E episodes, L steps of one, T of a window.

A selector gives every episode of a view an integer weight: its probability is its weight over the
sum of all. Where a window starts inside its episode is always drawn uniformly. Weights depend on
the episodes and their order alone, not on how they lie in segments.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from m3pc.types import InputError, Integers
from replay.store.view import EpisodeMask, StoreView, drawable

Selector = Callable[[StoreView], Integers]  # -> [E]
V = TypeVar("V", bound=StoreView)

MAX_TOTAL_WEIGHT = 1 << 62  # of all episodes together


def by_windows(length: int) -> Selector:
    """Every window of T steps is as likely: L - T + 1."""
    return lambda view: np.maximum(view.lengths - length + 1, 0)


def by_length(view: StoreView) -> Integers:
    """Episodes by their length: L. The authors call it "prob"."""
    return view.lengths


def uniform(view: StoreView) -> Integers:
    """Every episode is as likely."""
    return np.ones(len(view.lengths), np.int64)


def only(mask: EpisodeMask) -> Selector:
    """The episodes of a mask [E], in a store to which none are added."""
    return lambda view: mask.astype(np.int64)


def best_steps(count: int, *, among: Selector = uniform) -> Selector:
    """Complete episodes of highest return, together of `count` steps at most."""
    return lambda view: _marked(view, _within(view, by_return(view, among=among), count))


def newest_steps(count: int) -> Selector:
    """The newest complete episodes, together of `count` steps at most."""
    return lambda view: _marked(view, _within(view, np.flatnonzero(drawable(view))[::-1], count))


def product(*selectors: Callable[[V], Integers]) -> Callable[[V], Integers]:
    def weigh(view: V) -> Integers:
        weights = uniform(view)
        for selector in selectors:
            weights = weights * selector(view)
        return weights

    return weigh


def episode_weights(view: V, selector: Callable[[V], Integers], *, length: int) -> Integers:
    """[E] as the selector says, but 0 where an episode was withdrawn or holds no window."""
    usable = drawable(view) & (view.lengths >= length)
    weights: Integers = np.where(usable, selector(view), 0)
    total = float(weights.sum(dtype=np.float64))  # does not wrap around
    if weights.min(initial=0) < 0 or total > MAX_TOTAL_WEIGHT:
        raise InputError(
            f"the weights of {len(weights)} episodes of {view.path} sum to {total:.3g}, the "
            f"smallest is {weights.min()}; give weights of 0 or more that sum to "
            f"{MAX_TOTAL_WEIGHT:.3g} at most"
        )
    return weights


def by_return(view: StoreView, *, min_length: int = 1, among: Selector = uniform) -> Integers:
    """Numbers of the episodes of `min_length` steps or more that have a weight in `among`, by
    falling return; of equal ones the older first."""
    allowed = drawable(view) & (view.lengths >= min_length) & (among(view) > 0)
    order = np.argsort(-view.episode_returns, kind="stable")
    return order[allowed[order]]


def _within(view: StoreView, episodes: Integers, count: int) -> Integers:
    """The first of them that have `count` steps together, and one in any case."""
    steps = np.cumsum(view.lengths[episodes])
    return episodes[: max(int(np.searchsorted(steps, count, side="right")), 1)]


def _marked(view: StoreView, episodes: Integers) -> Integers:
    marks = np.zeros(len(view.lengths), np.int64)
    marks[episodes] = 1
    return marks
