"""How many candidates there is time for, by the durations of batches."""

from collections.abc import Sequence

import numpy as np
import pytest

from m3pc.types import Decision, PlanRequest
from planner.latency_model import (
    GAIN,
    MARGINS,
    MIN_CANDIDATES,
    RESERVE,
    DeadlineRequest,
    LatencyModel,
    ModeCost,
    measure_latency,
)
from tests.support.models.small_weights import windows

MAX_CANDIDATES = 64
# A pass takes 10 ms and a candidate 1 ms; without planning a row takes 2 ms beside a pass of 4 ms.
COSTS = {
    "m": ModeCost(per_pass=0.010, per_candidate=0.001),
    "q": ModeCost(per_pass=0.010, per_candidate=0.002),
    "rcbc": ModeCost(per_pass=0.004, per_candidate=0.002),
    "goal": ModeCost(per_pass=0.012, per_candidate=0.0),
}
FULL = PlanRequest(window=windows([4]))  # 64 candidates in mode m: 74 ms


def latency_model(active_sessions: int = 0) -> LatencyModel:
    model = LatencyModel(COSTS, mode="m", candidates=MAX_CANDIDATES)
    model.active_sessions = active_sessions
    return model


def due(
    seconds_left: float | None, *, now: int = 4, mode: str | None = None, at_arrival: float = 1.0
) -> DeadlineRequest:
    return DeadlineRequest(
        request=PlanRequest(window=windows([now]), mode=mode),
        seconds_left=seconds_left,
        seconds_at_arrival=at_arrival,
    )


def fitted(model: LatencyModel, *batch: DeadlineRequest) -> list[int | str | None]:
    """Candidates of each request, or the mode of one that is not planned."""
    return [
        request.mode if request.mode in ("rcbc", "goal") else request.candidates
        for request in model.fit_to_deadlines(batch)
    ]


@pytest.mark.parametrize(
    ("seconds_left", "expected"),
    [
        (0.010 + 0.064 + RESERVE, MAX_CANDIDATES),  # all of them, to the millisecond
        (0.010 + 0.063 + RESERVE, MAX_CANDIDATES - MIN_CANDIDATES),
        (0.010 + 0.016 + RESERVE, 16),
        (0.010 + 0.015 + RESERVE, MIN_CANDIDATES),
        (0.010 + 0.007 + RESERVE, "rcbc"),  # fewer are not worth it
        (0.001, "rcbc"),  # too late anyway
        (-5.0, "rcbc"),
    ],
)
def test_there_are_as_many_candidates_as_there_is_time_for(
    seconds_left: float, expected: int | str
) -> None:
    assert fitted(latency_model(), due(seconds_left + 1e-9)) == [expected]


def test_requests_without_a_deadline_are_not_changed() -> None:
    batch = [due(None), due(None, mode="q")]
    assert latency_model().fit_to_deadlines(batch) == [item.request for item in batch]


def test_rows_of_a_batch_share_the_time_of_the_most_urgent() -> None:
    assert fitted(latency_model(), due(0.010 + 0.032 + RESERVE), due(10.0)) == [16, 16]


def test_each_position_in_the_window_needs_its_own_pass() -> None:
    left = 2 * 0.010 + 0.032 + RESERVE
    assert fitted(latency_model(), due(left, now=4), due(left, now=1)) == [16, 16]


def test_modes_have_costs_of_their_own() -> None:
    assert fitted(latency_model(), due(0.010 + 0.032 + RESERVE, mode="q")) == [16]


def test_modes_without_candidates_are_not_changed() -> None:
    batch = due(0.0001, mode="goal"), due(0.0001, mode="rcbc")
    assert fitted(latency_model(), *batch) == ["goal", "rcbc"]


def test_a_late_request_does_not_reduce_the_budget_of_the_others() -> None:
    assert fitted(latency_model(), due(0.001), due(10.0)) == ["rcbc", MAX_CANDIDATES]


def test_half_of_the_time_is_left_to_sessions_that_may_send_a_request_meanwhile() -> None:
    seconds = 2 * (0.010 + 0.016 + RESERVE)
    request = due(seconds, at_arrival=seconds)
    assert fitted(latency_model(active_sessions=1), request) == [40]
    assert fitted(latency_model(active_sessions=2), request) == [16]


def test_a_request_may_name_fewer_candidates_than_there_is_time_for() -> None:
    request = PlanRequest(window=windows([4]), candidates=5)
    item = DeadlineRequest(request=request, seconds_left=10.0, seconds_at_arrival=10.0)
    assert fitted(latency_model(), item) == [5]


def test_a_machine_that_is_twice_as_slow_is_expected_to_be() -> None:
    model = latency_model()
    for _ in range(200):
        model.observe([FULL], 2 * 0.074)
    assert model.expected_seconds([FULL]) == pytest.approx(2 * 0.074 + RESERVE, rel=1e-3)


def test_both_costs_are_learned_from_batches_of_different_sizes() -> None:
    model = latency_model()
    small, middle = (PlanRequest(window=windows([4]), candidates=n) for n in (8, 32))
    for _ in range(500):
        model.observe([small], 0.030 + 8 * 0.0005)
        model.observe([FULL], 0.030 + 64 * 0.0005)
    expected = 0.030 + 32 * 0.0005 + RESERVE
    assert model.expected_seconds([middle]) == pytest.approx(expected, abs=1e-3)


def test_batches_that_vary_leave_a_margin() -> None:
    """One batch changes each cost by its share of the whole, so the squares of both count."""
    model = latency_model()
    model.observe([FULL], 0.074 + 0.010)
    squares = 0.010**2 + 0.064**2
    mean = 0.074 + squares / 0.074 * GAIN * (0.010 / 0.074)
    assert model.expected_seconds([FULL]) == pytest.approx(mean + MARGINS * GAIN * 0.010 + RESERVE)


def test_one_batch_that_was_delayed_counts_little_and_not_for_long() -> None:
    model = latency_model()
    model.observe([FULL], 60.0)
    assert model.expected_seconds([FULL]) < 0.074 * (1 + 3 * GAIN * (1 + MARGINS)) + RESERVE
    for _ in range(40):
        model.observe([FULL], 0.074)
    assert model.expected_seconds([FULL]) < 1.1 * 0.074 + RESERVE


def test_a_mode_that_was_too_slow_is_tried_again_when_the_machine_is_fast() -> None:
    model, request = latency_model(), due(0.1)
    for _ in range(50):
        model.observe([request.request], 1.0)
    assert fitted(model, request) == ["rcbc"]
    for _ in range(200):
        model.observe([PlanRequest(window=windows([4]), mode="rcbc")], 0.006)
    assert fitted(model, request) == [MAX_CANDIDATES]


def test_a_mode_that_is_not_used_is_as_slow_as_the_machine_is() -> None:
    model = latency_model()
    for _ in range(200):
        model.observe([PlanRequest(window=windows([4]), mode="rcbc")], 2 * 0.006)
    assert model.expected_seconds([FULL]) == pytest.approx(2 * 0.074 + RESERVE, rel=1e-3)


def test_replies_that_are_sent_late_reduce_the_time_to_plan() -> None:
    model = latency_model()
    for _ in range(200):
        model.observe_reply(0.004)
    assert model.expected_seconds([FULL]) == pytest.approx(0.074 + 0.004 + RESERVE, rel=1e-3)


def test_costs_are_measured_before_the_first_request() -> None:
    """By a clock that answers advance: 5 ms a batch, 0.1 ms a candidate or row."""
    now = 0.0

    def answer(requests: Sequence[PlanRequest]) -> list[Decision]:
        nonlocal now
        rows = sum((request.candidates or 1) * len(request.window) for request in requests)
        now += 0.005 + 1e-4 * rows
        return []

    model = measure_latency(
        answer, windows([0, 4]), mode="q", candidates=MAX_CANDIDATES, clock=lambda: now
    )
    assert model.expected_seconds([FULL]) == pytest.approx(0.005 + MAX_CANDIDATES * 1e-4 + RESERVE)
    plain = [PlanRequest(window=windows([4]), mode="rcbc")] * 3
    assert model.expected_seconds(plain) == pytest.approx(0.005 + 3e-4 + RESERVE)
    expected = 2 * 0.005 + (MAX_CANDIDATES + 3) * 1e-4 + RESERVE
    assert np.isclose(model.expected_seconds([FULL, *plain]), expected)
