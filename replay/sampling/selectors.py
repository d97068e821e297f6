"""Which episodes may be drawn, and how often. E episodes, L steps of one, T of a window.

A selector gives every episode of a view an integer weight: its probability is its weight over the
sum of all. The start of a window inside its episode is always uniform. Weights depend only on the
episodes and their order, not on the segments that hold them.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from m3pc.types import InputError, Integers
from replay.store.view import EpisodeMask, StoreView, drawable

Selector = Callable[[StoreView], Integers]  # -> [E]
V = TypeVar("V", bound=StoreView)

MAX_TOTAL_WEIGHT = 1 << 62  # sum over all episodes


def by_windows(length: int) -> Selector:
    """Weight L - T + 1: every window of T steps is equally likely."""
    return lambda view: np.maximum(view.lengths - length + 1, 0)


def by_length(view: StoreView) -> Integers:
    """Weight L. The authors call this "prob"."""
    return view.lengths


def uniform(view: StoreView) -> Integers:
    """Weight 1: every episode is equally likely."""
    return np.ones(len(view.lengths), np.int64)


def only(mask: EpisodeMask) -> Selector:
    """Select the episodes in a mask [E]; the store must not grow."""
    return lambda view: mask.astype(np.int64)


def best_steps(count: int, *, among: Selector = uniform) -> Selector:
    """Select the episodes of highest return, up to `count` steps in total, one at least."""
    return lambda view: _marked(view, _within(view, by_return(view, among=among), count))


def newest_steps(count: int) -> Selector:
    """Select the newest episodes, up to `count` steps in total, one at least."""
    return lambda view: _marked(view, _within(view, np.flatnonzero(drawable(view))[::-1], count))


def product(*selectors: Callable[[V], Integers]) -> Callable[[V], Integers]:
    def weigh(view: V) -> Integers:
        weights = uniform(view)
        for selector in selectors:
            weights = weights * selector(view)
        return weights

    return weigh


def episode_weights(view: V, selector: Callable[[V], Integers], *, length: int) -> Integers:
    """[E] The selector's weights, but 0 where an episode was withdrawn or holds no window."""
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
    """Return the numbers of drawable episodes of `min_length` steps or more with a weight in
    `among`, sorted by falling return; equal returns by age, oldest first."""
    allowed = drawable(view) & (view.lengths >= min_length) & (among(view) > 0)
    order = np.argsort(-view.episode_returns, kind="stable")
    return order[allowed[order]]


def _within(view: StoreView, episodes: Integers, count: int) -> Integers:
    """Return the first episodes, up to `count` steps in total, but at least one."""
    steps = np.cumsum(view.lengths[episodes])
    return episodes[: max(int(np.searchsorted(steps, count, side="right")), 1)]


def _marked(view: StoreView, episodes: Integers) -> Integers:
    marks = np.zeros(len(view.lengths), np.int64)
    marks[episodes] = 1
    return marks
