"""How long a batch takes, measured all the time, and how many candidates there is time for.

A batch costs, for each group of rows that goes through the network together, a fixed time, and for
each candidate of each row a bit more. Both are kept by mode and follow what batches really take.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from m3pc.config.schema import BACKWARD, MODES
from m3pc.types import PlanRequest, Window
from planner.requests import AnswerFn, some

LEAST: Final = 8  # candidates: fewer are not worth a plan; more come in steps of as many
GAIN: Final = 0.2  # weight of the last batch
MARGINS: Final = 4.0  # mean deviations that are kept free, as TCP does before it sends again
RESERVE: Final = 0.002  # seconds for what nobody here can measure: sockets and the way
LARGEST_ERROR: Final = 3.0  # times what was expected: one batch that was held up says no more
RECALL: Final = 0.05  # weight of the last batch in costs of modes that it did not have
REPEATS: Final = 3  # of each measurement at the start; the least counts
TRIED: Final = (LEAST, 8 * LEAST)  # candidates measured at the start
UNPLANNED: Final = ("rcbc", *BACKWARD)  # modes without candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCost:
    fixed: float  # seconds of a pass through the network
    each: float  # seconds of a candidate; of a row, in modes without


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineRequest:
    """A request, and until when its answer is wanted."""

    ask: PlanRequest
    left: float | None = None  # seconds; None: whenever it comes
    span: float = 0.0  # seconds that there were when it arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Of a batch, by mode."""

    passes: Mapping[str, int]
    plans: Mapping[str, int]


class LatencyModel:
    """Learns from every batch; for one thread, but for `company` and `replied`."""

    def __init__(self, costs: Mapping[str, ModeCost], *, mode: str, candidates: int) -> None:
        """`mode` and `candidates`: of whoever asks for none."""
        self._costs, self._mode, self._candidates = dict(costs), mode, candidates
        self._first = dict(costs)
        self._deviation = 0.0  # mean of |taken - expected|, seconds
        self._reply = self._reply_deviation = 0.0  # seconds from a batch to its answers, the same
        self.company = 1  # robots that may ask at any time, each once at a time

    def fitted(self, batch: Sequence[DeadlineRequest]) -> list[PlanRequest]:
        """Each with as many candidates as there is time for, or without planning.

        Who cannot be answered in time any more keeps nobody else from planning.
        """
        if all(due.left is None for due in batch):
            return [due.ask for due in batch]
        quick = self.expected(self._planned(batch, [0] * len(batch)))
        timely = [due.left is not None and due.left > quick for due in batch]
        room = self._room([due for due, still in zip(batch, timely, strict=True) if still], batch)
        return self._planned(batch, self._affordable(batch, timely, room))

    def expected(self, asks: Sequence[PlanRequest]) -> float:
        """Seconds that hardly ever are too few."""
        means = self._mean(self._work(asks)) + self._reply
        return means + MARGINS * max(self._deviation, self._reply_deviation) + RESERVE

    def observe(self, asks: Sequence[PlanRequest], seconds: float) -> None:
        """Each cost follows as far as it had a part in what was expected."""
        work = self._work(asks)
        expected = self._mean(work)
        self._recall(work, seconds)
        error = min(seconds / expected - 1, LARGEST_ERROR)
        self._deviation += GAIN * (abs(error) * expected - self._deviation)
        for mode, passes in work.passes.items():
            cost = self._costs[mode]
            shares = passes * cost.fixed / expected, work.plans[mode] * cost.each / expected
            fixed, each = (1 + GAIN * share * error for share in shares)
            self._costs[mode] = ModeCost(fixed=cost.fixed * fixed, each=cost.each * each)

    def _recall(self, work: BatchLoad, seconds: float) -> None:
        """Modes that are not used are no slower than the machine is now: else one that was once
        found too slow would never be tried again."""
        slow = min(seconds / self._mean(work, self._first), 1 + LARGEST_ERROR)
        for mode, first in self._first.items():
            if mode not in work.passes:
                cost = self._costs[mode]
                self._costs[mode] = ModeCost(
                    fixed=cost.fixed + RECALL * (slow * first.fixed - cost.fixed),
                    each=cost.each + RECALL * (slow * first.each - cost.each),
                )

    def replied(self, seconds: float) -> None:
        """So long after a batch an answer left."""
        error = min(seconds - self._reply, LARGEST_ERROR * max(self._reply, RESERVE))
        self._reply_deviation += GAIN * (abs(error) - self._reply_deviation)
        self._reply += GAIN * error

    def _room(self, timely: Sequence[DeadlineRequest], batch: Sequence[DeadlineRequest]) -> float:
        """Seconds that the batch may take."""
        room = min((due.left for due in timely if due.left is not None), default=0.0)
        if sum(len(due.ask.window) for due in batch) >= self.company:
            return room
        # Who asks in the next moment waits for this batch, and then for its own.
        return min(room, min((due.span for due in timely), default=0.0) / 2)

    def _affordable(
        self, batch: Sequence[DeadlineRequest], timely: Sequence[bool], room: float
    ) -> list[int]:
        """Candidates of each, in steps, alike for all that are timely; 0: there is no time."""
        asked = [self._asked(due.ask) for due in batch]
        most = max((n for n, still in zip(asked, timely, strict=True) if still), default=0)
        least = min(LEAST, most)

        def all_with(count: int) -> list[int]:
            return [min(count, n) * still for n, still in zip(asked, timely, strict=True)]

        low, high = (self.expected(self._planned(batch, all_with(n))) for n in (least, most))
        if high <= room:
            return all_with(most)
        if low > room or high <= low:
            return all_with(0)
        share = (room - low) / (high - low)
        return all_with(least + int(share * (most - least)) // LEAST * LEAST)

    def _planned(
        self, batch: Sequence[DeadlineRequest], counts: Sequence[int]
    ) -> list[PlanRequest]:
        """With so many candidates each; where that is 0, without planning."""
        found = []
        for due, count in zip(batch, counts, strict=True):
            ask = due.ask
            if due.left is not None and self._asked(ask):
                mode = ask.mode if count else "rcbc"
                ask = replace(ask, mode=mode, candidates=count or None)
            found.append(ask)
        return found

    def _asked(self, ask: PlanRequest) -> int:
        if (ask.mode or self._mode) in UNPLANNED:
            return 0
        return ask.candidates or self._candidates

    def _mean(self, work: BatchLoad, costs: Mapping[str, ModeCost] | None = None) -> float:
        known = costs or self._costs
        return sum(
            passes * known[mode].fixed + work.plans[mode] * known[mode].each
            for mode, passes in work.passes.items()
        )

    def _work(self, asks: Sequence[PlanRequest]) -> BatchLoad:
        """Rows go through the network together that are at the same place of their windows, in the
        same mode and with as many candidates."""
        groups: set[tuple[str, int, int]] = set()
        plans: Counter[str] = Counter()
        for ask in asks:
            mode, count = ask.mode or self._mode, self._asked(ask)
            groups |= {(mode, count, now) for now in ask.window.now.tolist()}
            plans[mode] += len(ask.window) * max(count, 1)
        return BatchLoad(passes=Counter(mode for mode, _, _ in groups), plans=plans)


def measured(
    answer: AnswerFn,
    window: Window,
    *,
    mode: str,
    candidates: int,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyModel:
    """By what `answer` takes for a row of a window, in every mode."""
    row = some(window, np.arange(1))

    def seconds(asks: Sequence[PlanRequest]) -> float:
        found = []
        for _ in range(1 + REPEATS):  # the first fills caches
            begin = clock()
            answer(asks)
            found.append(clock() - begin)
        return max(min(found[1:]), 1e-6)

    def cost(mode: str) -> ModeCost:
        few, many = TRIED
        if mode in UNPLANNED:
            one, more = (seconds([PlanRequest(window=row, mode=mode)] * n) for n in TRIED)
        else:
            one, more = (seconds([PlanRequest(window=row, mode=mode, candidates=n)]) for n in TRIED)
        each = max(more - one, 1e-9) / (many - few)
        return ModeCost(fixed=max(one - few * each, 1e-6), each=each)

    return LatencyModel({mode: cost(mode) for mode in MODES}, mode=mode, candidates=candidates)
