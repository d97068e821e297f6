"""How many candidates there is time for, by what batches took."""

import numpy as np
import pytest

from m3pc.types import PlanRequest
from planner.latency_model import (
    GAIN,
    LEAST,
    MARGINS,
    RESERVE,
    DeadlineRequest,
    LatencyModel,
    ModeCost,
    measured,
)
from tests.support.models.small_weights import windows

MOST = 64
# A pass takes 10 ms and a candidate 1 ms; without planning a row takes 2 ms beside a pass of 4 ms.
COSTS = {
    "m": ModeCost(fixed=0.010, each=0.001),
    "q": ModeCost(fixed=0.010, each=0.002),
    "rcbc": ModeCost(fixed=0.004, each=0.002),
    "goal": ModeCost(fixed=0.012, each=0.0),
}


def pace(company: int = 0) -> LatencyModel:
    found = LatencyModel(COSTS, mode="m", candidates=MOST)
    found.company = company
    return found


def due(
    left: float | None, *, now: int = 4, mode: str | None = None, span: float = 1.0
) -> DeadlineRequest:
    return DeadlineRequest(ask=PlanRequest(window=windows([now]), mode=mode), left=left, span=span)


def used(found: PlanRequest) -> int | str | None:
    """Candidates, or the mode of what does not plan."""
    return found.mode if found.mode in ("rcbc", "goal") else found.candidates


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (0.010 + 0.064 + RESERVE, MOST),  # all of them, to the millisecond
        (0.010 + 0.063 + RESERVE, MOST - LEAST),
        (0.010 + 0.016 + RESERVE, 16),
        (0.010 + 0.015 + RESERVE, LEAST),
        (0.010 + 0.007 + RESERVE, "rcbc"),  # fewer are not worth it
        (0.001, "rcbc"),  # too late anyway
        (-5.0, "rcbc"),
    ],
)
def test_there_are_as_many_candidates_as_there_is_time_for(
    left: float, expected: int | str
) -> None:
    (found,) = pace().fitted([due(left + 1e-9)])
    assert used(found) == expected


def test_who_can_wait_is_answered_in_full() -> None:
    asks = [due(None), due(None, mode="q")]
    assert pace().fitted(asks) == [each.ask for each in asks]


def test_rows_of_a_batch_share_the_time_of_the_most_urgent() -> None:
    found = pace().fitted([due(0.010 + 0.032 + RESERVE), due(10.0)])
    assert [used(each) for each in found] == [16, 16]


def test_places_in_the_window_are_passes_of_their_own() -> None:
    left = 2 * 0.010 + 0.032 + RESERVE
    found = pace().fitted([due(left, now=4), due(left, now=1)])
    assert [used(each) for each in found] == [16, 16]


def test_modes_have_costs_of_their_own() -> None:
    assert used(pace().fitted([due(0.010 + 0.032 + RESERVE, mode="q")])[0]) == 16


def test_what_has_no_candidates_is_left_as_it_is() -> None:
    found = pace().fitted([due(0.0001, mode="goal"), due(0.0001, mode="rcbc")])
    assert [used(each) for each in found] == ["goal", "rcbc"]


def test_who_is_too_late_keeps_nobody_else_from_planning() -> None:
    late, timely = pace().fitted([due(0.001), due(10.0)])
    assert (used(late), used(timely)) == ("rcbc", MOST)


def test_half_of_the_time_is_left_to_those_who_may_ask_meanwhile() -> None:
    wanted = 0.010 + 0.016 + RESERVE
    alone = pace(company=1).fitted([due(2 * wanted, span=2 * wanted)])[0]
    shared = pace(company=2).fitted([due(2 * wanted, span=2 * wanted)])[0]
    assert (used(alone), used(shared)) == (40, 16)


def test_a_request_may_ask_for_fewer_than_there_is_time_for() -> None:
    asked = DeadlineRequest(
        ask=PlanRequest(window=windows([4]), candidates=5), left=10.0, span=10.0
    )
    assert used(pace().fitted([asked])[0]) == 5


def test_a_machine_that_is_twice_as_slow_is_believed_to_be() -> None:
    found, asks = pace(), [PlanRequest(window=windows([4]))]
    for _ in range(200):
        found.observe(asks, 2 * 0.074)
    assert found.expected(asks) == pytest.approx(2 * 0.074 + RESERVE, rel=1e-3)


def test_both_costs_are_found_from_batches_of_different_sizes() -> None:
    found = pace()
    small, large = PlanRequest(window=windows([4]), candidates=8), PlanRequest(window=windows([4]))
    for _ in range(500):
        found.observe([small], 0.030 + 8 * 0.0005)
        found.observe([large], 0.030 + 64 * 0.0005)
    middle = found.expected([PlanRequest(window=windows([4]), candidates=32)])
    assert middle == pytest.approx(0.030 + 32 * 0.0005 + RESERVE, abs=1e-3)


def test_batches_that_vary_leave_a_margin() -> None:
    found, asks = pace(), [PlanRequest(window=windows([4]))]
    found.observe(asks, 0.074 + 0.010)
    mean = 0.074 + found_change(0.010 / 0.074)
    assert found.expected(asks) == pytest.approx(mean + MARGINS * GAIN * 0.010 + RESERVE)


def found_change(error: float) -> float:
    """What one batch changes: each cost by its part, so the squares of both count."""
    return sum(cost**2 for cost in (0.010, 0.064)) / 0.074 * GAIN * error


def test_one_batch_that_was_held_up_is_not_believed_for_long() -> None:
    found, asks = pace(), [PlanRequest(window=windows([4]))]
    found.observe(asks, 60.0)
    assert found.expected(asks) < 0.074 * (1 + 3 * GAIN * (1 + MARGINS)) + RESERVE
    for _ in range(40):
        found.observe(asks, 0.074)
    assert found.expected(asks) < 1.1 * 0.074 + RESERVE


def test_a_mode_that_was_too_slow_is_tried_again_when_the_machine_is_quick() -> None:
    found, asked = pace(), due(0.1)
    for _ in range(50):
        found.observe([asked.ask], 1.0)
    assert used(found.fitted([asked])[0]) == "rcbc"
    for _ in range(200):
        found.observe([PlanRequest(window=windows([4]), mode="rcbc")], 0.006)
    assert used(found.fitted([asked])[0]) == MOST


def test_a_mode_that_is_not_used_is_as_slow_as_the_machine_is() -> None:
    found = pace()
    for _ in range(200):
        found.observe([PlanRequest(window=windows([4]), mode="rcbc")], 2 * 0.006)
    assert found.expected([PlanRequest(window=windows([4]))]) == pytest.approx(
        2 * 0.074 + RESERVE, rel=1e-3
    )


def test_answers_that_leave_late_take_from_the_time_to_plan() -> None:
    found, asks = pace(), [PlanRequest(window=windows([4]))]
    for _ in range(200):
        found.replied(0.004)
    assert found.expected(asks) == pytest.approx(0.074 + 0.004 + RESERVE, rel=1e-3)


def test_costs_are_measured_before_anybody_asks() -> None:
    """By a clock that an answer moves: 5 ms a batch, 0.1 ms a candidate or row."""
    now = [0.0]

    def answer(asks: object) -> list[object]:
        assert isinstance(asks, list)
        now[0] += 0.005 + sum(1e-4 * (ask.candidates or 1) * len(ask.window) for ask in asks)
        return []

    found = measured(
        answer,  # type: ignore[arg-type]
        windows([0, 4]),
        mode="q",
        candidates=MOST,
        clock=lambda: now[0],
    )
    full = PlanRequest(window=windows([4]))
    assert found.expected([full]) == pytest.approx(0.005 + MOST * 1e-4 + RESERVE)
    plain = [PlanRequest(window=windows([4]), mode="rcbc")] * 3
    assert found.expected(plain) == pytest.approx(0.005 + 3e-4 + RESERVE)
    assert np.isclose(found.expected([full, *plain]), 2 * 0.005 + (MOST + 3) * 1e-4 + RESERVE)
