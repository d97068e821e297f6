"""Concatenates and splits requests and decisions by row; a row is one environment."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from m3pc.types import Decision, PlanRequest, Window

AnswerFn = Callable[[Sequence[PlanRequest]], Sequence[Decision]]

WINDOW_FIELDS = ("states", "actions", "now", "steps", "seeds")
DECISION_FIELDS = ("actions", "target_returns", "utilities", "effective_candidates", "utility_std")


def concatenate(windows: Sequence[Window]) -> Window:
    """One window with the rows of all."""
    return Window(**{n: np.concatenate([getattr(w, n) for w in windows]) for n in WINDOW_FIELDS})


def select_rows(window: Window, index: slice | np.ndarray) -> Window:
    return Window(**{name: getattr(window, name)[index] for name in WINDOW_FIELDS})


def concatenate_decisions(decisions: Sequence[Decision]) -> Decision:
    """One decision with the rows of all, which must have the same version."""
    arrays = {n: np.concatenate([getattr(d, n) for d in decisions]) for n in DECISION_FIELDS}
    return Decision(**arrays, version=decisions[0].version)


def split_decision(decision: Decision, sizes: Iterable[int]) -> list[Decision]:
    """Split the rows of a decision into consecutive parts of these sizes, copied."""
    parts, first = [], 0
    for size in sizes:
        rows = slice(first, first + size)
        arrays = {name: getattr(decision, name)[rows].copy() for name in DECISION_FIELDS}
        parts.append(Decision(**arrays, version=decision.version))
        first += size
    return parts


def count_fitting(sizes: Iterable[int], max_rows: int) -> int:
    """How many leading requests fit into a batch of `max_rows`; the first counts in any case."""
    count = total = 0
    for size in sizes:
        total += size
        if count and total > max_rows:
            break
        count += 1
    return count


def answer_in_chunks(
    answer: AnswerFn, requests: Sequence[PlanRequest], max_rows: int
) -> list[Decision]:
    """The decisions of `answer`, called with at most `max_rows` rows at a time."""
    queue = [(n, part) for n, request in enumerate(requests) for part in _cut(request, max_rows)]
    decisions: list[list[Decision]] = [[] for _ in requests]
    while queue:
        count = count_fitting((len(part.window) for _, part in queue), max_rows)
        group, queue = queue[:count], queue[count:]
        for (n, _), decision in zip(group, answer([part for _, part in group]), strict=True):
            decisions[n].append(decision)
    return [concatenate_decisions(parts) for parts in decisions]


def _cut(request: PlanRequest, max_rows: int) -> Iterator[PlanRequest]:
    for first in range(0, len(request.window), max_rows):
        yield replace(request, window=select_rows(request.window, slice(first, first + max_rows)))
