"""Requests as rows: put end to end, cut, and their answers put together again.

E environments of a request; a row is one environment.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from m3pc.types import Decision, PlanRequest, Window

AnswerFn = Callable[[Sequence[PlanRequest]], Sequence[Decision]]

WINDOW = ("states", "actions", "now", "steps", "seeds")
DECISION = ("actions", "target_returns", "utilities", "effective_candidates", "utility_std")


def joined(windows: Sequence[Window]) -> Window:
    """One window with the rows of all."""
    return Window(**{n: np.concatenate([getattr(w, n) for w in windows]) for n in WINDOW})


def some(window: Window, index: slice | np.ndarray) -> Window:
    return Window(**{name: getattr(window, name)[index] for name in WINDOW})


def apart(decision: Decision, sizes: Iterable[int]) -> list[Decision]:
    """The rows of a decision, given back to requests of these sizes; each owns its numbers."""
    parts, first = [], 0
    for size in sizes:
        rows = slice(first, first + size)
        own = {name: getattr(decision, name)[rows].copy() for name in DECISION}
        parts.append(Decision(**own, version=decision.version))
        first += size
    return parts


def fitting(sizes: Iterable[int], most: int) -> int:
    """How many of the first go into one batch of `most` rows; the first always does."""
    count = total = 0
    for size in sizes:
        total += size
        if count and total > most:
            break
        count += 1
    return count


def in_pieces(answer: AnswerFn, asks: Sequence[PlanRequest], most: int) -> list[Decision]:
    """What `answer` says to all of them, asked with at most `most` rows at a time."""
    parts = [(n, part) for n, ask in enumerate(asks) for part in _cut(ask, most)]
    found: list[list[Decision]] = [[] for _ in asks]
    while parts:
        count = fitting((len(part.window) for _, part in parts), most)
        group, parts = parts[:count], parts[count:]
        for (n, _), decision in zip(group, answer([part for _, part in group]), strict=True):
            found[n].append(decision)
    return [_whole(each) for each in found]


def _cut(ask: PlanRequest, most: int) -> Iterator[PlanRequest]:
    for first in range(0, len(ask.window), most):
        yield replace(ask, window=some(ask.window, slice(first, first + most)))


def _whole(parts: Sequence[Decision]) -> Decision:
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in DECISION}
    return Decision(**arrays, version=parts[0].version)
