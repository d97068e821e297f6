"""Predicts how long a batch takes and chooses how many candidates there is time for.

A pass is a group of rows that go through the network together. A batch costs a fixed time per pass
and some more per candidate of each row. Both costs are kept by mode and follow the measured
durations of batches.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from m3pc.config.schema import BACKWARD, MODES
from m3pc.types import PlanRequest, Window
from planner.requests import AnswerFn, select_rows

MIN_CANDIDATES: Final = 8  # fewer are not worth planning; also the step between counts
GAIN: Final = 0.2  # weight of the newest batch in the costs of its modes
MARGINS: Final = 4.0  # margin in mean deviations, as in TCP's retransmission timeout
RESERVE: Final = 0.002  # seconds kept for sockets and the network, which are not measured here
MAX_ERROR: Final = 3.0  # largest relative error to learn from; longer batches count as this
RECALL: Final = 0.05  # weight of the newest batch in the costs of modes that it lacks
REPEATS: Final = 3  # repetitions of each initial measurement, the shortest counts
START_CANDIDATES: Final = (MIN_CANDIDATES, 8 * MIN_CANDIDATES)  # measured at the start
UNPLANNED_MODES: Final = ("rcbc", *BACKWARD)  # modes without candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCost:
    per_pass: float  # seconds
    per_candidate: float  # seconds; per row in modes without candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineRequest:
    """A request and the time left for its reply."""

    request: PlanRequest
    seconds_left: float | None = None  # None: no deadline
    seconds_at_arrival: float = 0.0  # time that was left when the request arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Work of a batch, by mode."""

    passes: Mapping[str, int]
    candidates: Mapping[str, int]  # rows in modes without candidates


class LatencyModel:
    """Learns from every batch. Only `active_sessions` and `observe_reply` are for any thread."""

    def __init__(self, costs: Mapping[str, ModeCost], *, mode: str, candidates: int) -> None:
        """`mode` and `candidates` are the defaults of requests."""
        self._costs, self._mode, self._candidates = dict(costs), mode, candidates
        self._initial_costs = dict(costs)
        self._deviation = 0.0  # mean of |measured - expected|, seconds
        self._reply = 0.0  # mean seconds from the end of a batch until a reply is sent
        self._reply_deviation = 0.0
        self.active_sessions = 1  # robots that may send a request at any time, one each

    def fit_to_deadlines(self, batch: Sequence[DeadlineRequest]) -> list[PlanRequest]:
        """Give the requests as many candidates as there is time for, or none: then mode rcbc.

        Requests that are already late do not reduce the budget of the others.
        """
        if all(item.seconds_left is None for item in batch):
            return [item.request for item in batch]
        unplanned_seconds = self.expected_seconds(self._with_candidates(batch, [0] * len(batch)))
        timely = [
            item.seconds_left is not None and item.seconds_left > unplanned_seconds
            for item in batch
        ]
        counts = self._affordable(batch, timely, self._budget(batch, timely))
        return self._with_candidates(batch, counts)

    def expected_seconds(self, requests: Sequence[PlanRequest]) -> float:
        """Conservative estimate of the batch's duration (mean plus margin), in seconds."""
        mean = self._mean_seconds(self._load(requests)) + self._reply
        return mean + MARGINS * max(self._deviation, self._reply_deviation) + RESERVE

    def observe(self, requests: Sequence[PlanRequest], seconds: float) -> None:
        """Learn a batch's duration: each cost's relative change is GAIN times the relative error
        times the cost's share in the expected duration."""
        load = self._load(requests)
        expected = self._mean_seconds(load)
        self._recall(load, seconds)
        error = min(seconds / expected - 1, MAX_ERROR)
        self._deviation += GAIN * (abs(error) * expected - self._deviation)
        for mode, passes in load.passes.items():
            cost = self._costs[mode]
            shares = (
                passes * cost.per_pass / expected,
                load.candidates[mode] * cost.per_candidate / expected,
            )
            pass_factor, candidate_factor = (1 + GAIN * share * error for share in shares)
            self._costs[mode] = ModeCost(
                per_pass=cost.per_pass * pass_factor,
                per_candidate=cost.per_candidate * candidate_factor,
            )

    def observe_reply(self, seconds: float) -> None:
        """Learn how long after its batch a reply was sent."""
        error = min(seconds - self._reply, MAX_ERROR * max(self._reply, RESERVE))
        self._reply_deviation += GAIN * (abs(error) - self._reply_deviation)
        self._reply += GAIN * error

    def requested_candidates(self, request: PlanRequest) -> int:
        """Candidates of a request if there is enough time; 0 in a mode without candidates."""
        if (request.mode or self._mode) in UNPLANNED_MODES:
            return 0
        return request.candidates or self._candidates

    def _recall(self, load: BatchLoad, seconds: float) -> None:
        """Move the costs of modes that this batch lacks towards their initial values times the
        machine's current slowness. Otherwise a mode once too slow would never be tried again."""
        slowness = min(seconds / self._mean_seconds(load, self._initial_costs), 1 + MAX_ERROR)
        for mode, initial in self._initial_costs.items():
            if mode not in load.passes:
                cost = self._costs[mode]
                self._costs[mode] = ModeCost(
                    per_pass=cost.per_pass + RECALL * (slowness * initial.per_pass - cost.per_pass),
                    per_candidate=cost.per_candidate
                    + RECALL * (slowness * initial.per_candidate - cost.per_candidate),
                )

    def _budget(self, batch: Sequence[DeadlineRequest], timely: Sequence[bool]) -> float:
        """Seconds that the batch may take."""
        items = [item for item, is_timely in zip(batch, timely, strict=True) if is_timely]
        left = [item.seconds_left for item in items if item.seconds_left is not None]
        seconds = min(left, default=0.0)
        if sum(len(item.request.window) for item in batch) >= self.active_sessions:
            return seconds
        # Half of the time: a request that arrives next waits for this batch and then for its own.
        return min(seconds, min((item.seconds_at_arrival for item in items), default=0.0) / 2)

    def _affordable(
        self, batch: Sequence[DeadlineRequest], timely: Sequence[bool], budget: float
    ) -> list[int]:
        """Candidates of each request: a common limit for all timely requests, 0 for late ones and
        if there is no time."""
        requested = [self.requested_candidates(item.request) for item in batch]
        highest = max((n for n, ok in zip(requested, timely, strict=True) if ok), default=0)
        lowest = min(MIN_CANDIDATES, highest)

        def at_most(count: int) -> list[int]:
            return [min(count, n) * ok for n, ok in zip(requested, timely, strict=True)]

        low, high = (
            self.expected_seconds(self._with_candidates(batch, at_most(n)))
            for n in (lowest, highest)
        )
        if high <= budget:
            return at_most(highest)
        if low > budget or high <= low:
            return at_most(0)
        share = (budget - low) / (high - low)
        steps = int(share * (highest - lowest)) // MIN_CANDIDATES
        return at_most(lowest + steps * MIN_CANDIDATES)

    def _with_candidates(
        self, batch: Sequence[DeadlineRequest], counts: Sequence[int]
    ) -> list[PlanRequest]:
        """Set the candidates of requests with a deadline; a count of 0 selects mode rcbc."""
        requests = []
        for item, count in zip(batch, counts, strict=True):
            request = item.request
            if item.seconds_left is not None and self.requested_candidates(request):
                mode = request.mode if count else "rcbc"
                request = replace(request, mode=mode, candidates=count or None)
            requests.append(request)
        return requests

    def _mean_seconds(self, load: BatchLoad, costs: Mapping[str, ModeCost] | None = None) -> float:
        costs = costs or self._costs
        return sum(
            passes * costs[mode].per_pass + load.candidates[mode] * costs[mode].per_candidate
            for mode, passes in load.passes.items()
        )

    def _load(self, requests: Sequence[PlanRequest]) -> BatchLoad:
        """Rows share a pass if they have the same position in their windows, the same mode and the
        same number of candidates."""
        passes: set[tuple[str, int, int]] = set()
        candidates: Counter[str] = Counter()
        for request in requests:
            mode, count = request.mode or self._mode, self.requested_candidates(request)
            passes |= {(mode, count, now) for now in request.window.now.tolist()}
            candidates[mode] += len(request.window) * max(count, 1)
        return BatchLoad(passes=Counter(mode for mode, _, _ in passes), candidates=candidates)


def measure_latency(
    answer: AnswerFn,
    window: Window,
    *,
    mode: str,
    candidates: int,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyModel:
    """Measure `answer` on one row of a window in every mode, as initial costs of a model."""
    row = select_rows(window, np.arange(1))

    def seconds(requests: Sequence[PlanRequest]) -> float:
        durations = []
        for _ in range(1 + REPEATS):  # the first fills caches
            begin = clock()
            answer(requests)
            durations.append(clock() - begin)
        return max(min(durations[1:]), 1e-6)

    def cost(mode: str) -> ModeCost:
        def requests(count: int) -> list[PlanRequest]:
            if mode in UNPLANNED_MODES:
                return [PlanRequest(window=row, mode=mode)] * count
            return [PlanRequest(window=row, mode=mode, candidates=count)]

        few, many = START_CANDIDATES
        less, more = seconds(requests(few)), seconds(requests(many))
        per_candidate = max(more - less, 1e-9) / (many - few)
        return ModeCost(per_pass=max(less - few * per_candidate, 1e-6), per_candidate=per_candidate)

    return LatencyModel({mode: cost(mode) for mode in MODES}, mode=mode, candidates=candidates)
