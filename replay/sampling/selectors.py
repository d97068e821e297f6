"""Which episodes may be drawn, and how often. E episodes, L steps of one, T of a piece.

A selection gives every episode of a view a weight, a whole number: its chance is its weight over
the sum of all. Where a piece starts inside its episode is always drawn evenly. Weights depend on
the episodes and their order alone, not on how they lie in segments.
"""

from collections.abc import Callable

import numpy as np

from m3pc.types import InputError, Integers
from replay.store.view import EpisodeMask, StoreView, drawable

Selection = Callable[[StoreView], Integers]  # -> [E]

RECENCY_UNIT = 1 << 24  # weight of the newest episode; one of 24 half-lives ago still has a chance
MOST_WEIGHT = 1 << 62  # that all episodes may have together


def by_pieces(length: int) -> Selection:
    """Every piece of T steps alike: L - T + 1."""
    return lambda view: np.maximum(view.lengths - length + 1, 0)


def by_length(view: StoreView) -> Integers:
    """Episodes by their length: L. The authors call it "prob"."""
    return view.lengths


def alike(view: StoreView) -> Integers:
    return np.ones(len(view.lengths), np.int64)


def only(chosen: EpisodeMask) -> Selection:
    """The episodes named [E] of a store to which none are added."""
    return lambda view: chosen.astype(np.int64)


def best(count: int, *, minimum: int = 1, among: Selection = alike) -> Selection:
    """The `count` episodes of highest return of those with `minimum` steps and a weight in `among`;
    of equal ones the older."""

    def weigh(view: StoreView) -> Integers:
        return _marked(view, by_return(view, minimum=minimum, among=among)[:count])

    return weigh


def best_steps(count: int, *, among: Selection = alike) -> Selection:
    """Episodes of highest return, whole, as long as they have `count` steps together at most."""
    return lambda view: _marked(view, _within(view, by_return(view, among=among), count))


def newest_steps(count: int) -> Selection:
    """The newest episodes, whole, as long as they have `count` steps together at most."""
    return lambda view: _marked(view, _within(view, np.flatnonzero(drawable(view))[::-1], count))


def recent(half_life: float) -> Selection:
    """An episode counts half as much as one that came `half_life` episodes after it. Weights are
    rounded down to 1 / RECENCY_UNIT of the newest one's, so the oldest get 0 in the end."""
    if not half_life > 0:
        raise InputError(f"the half-life is {half_life} episodes; give a number above 0")

    def weigh(view: StoreView) -> Integers:
        age = np.arange(len(view.lengths))[::-1]
        weight: Integers = np.floor(RECENCY_UNIT * np.exp2(-age / half_life)).astype(np.int64)
        return weight

    return weigh


def product(*selections: Selection) -> Selection:
    def weigh(view: StoreView) -> Integers:
        found = alike(view)
        for selection in selections:
            found = found * selection(view)
        return found

    return weigh


def weights(view: StoreView, selection: Selection, *, length: int) -> Integers:
    """[E] as the selection says, but 0 where an episode was withdrawn or holds no piece."""
    found = np.where(drawable(view) & (view.lengths >= length), selection(view), 0)
    total = float(found.sum(dtype=np.float64))  # does not wrap around
    if found.min(initial=0) < 0 or total > MOST_WEIGHT:
        raise InputError(
            f"the weights of {len(found)} episodes of {view.path} sum to {total:.3g}, the least is "
            f"{found.min()}; give weights of 0 or more that sum to {MOST_WEIGHT:.3g} at most"
        )
    return found


def by_return(view: StoreView, *, minimum: int = 1, among: Selection = alike) -> Integers:
    """Numbers of the episodes that `best` chooses from, the best first."""
    open_to = drawable(view) & (view.lengths >= minimum) & (among(view) > 0)
    order = np.argsort(-view.episode_returns, kind="stable")
    return order[open_to[order]]


def _within(view: StoreView, order: Integers, count: int) -> Integers:
    """The first of them that fit, and one in any case."""
    together = np.cumsum(view.lengths[order])
    return order[: max(int(np.searchsorted(together, count, side="right")), 1)]


def _marked(view: StoreView, episodes: Integers) -> Integers:
    marks = np.zeros(len(view.lengths), np.int64)
    marks[episodes] = 1
    return marks
