"""When updates that were left out ask for a return, and when for the end."""

import pytest

from learner.divergence_guard import DivergenceGuard
from m3pc.types import DivergedError


def asked(health: DivergenceGuard, numbers: range) -> list[int]:
    """Which of these updates, all left out, ask for a return."""
    return [number for number in numbers if health.skipped(number)]


def test_ten_in_a_row_ask_for_a_return() -> None:
    assert asked(DivergenceGuard(), range(100, 110)) == [109]


def test_nine_and_then_one_later_do_not() -> None:
    health = DivergenceGuard()
    assert asked(health, range(100, 109)) == []
    assert not health.skipped(110)


def test_more_than_one_in_a_hundred_of_the_last_thousand_ask_for_a_return() -> None:
    assert (
        asked(DivergenceGuard(), range(0, 1001, 100)) == []
    )  # ten in each thousand, 0 is out of it
    assert asked(DivergenceGuard(), range(0, 1000, 99)) == [990]  # the eleventh


def test_after_a_return_counting_begins_anew() -> None:
    health = DivergenceGuard(range(9))
    health.rolled_back()
    assert health.recent == []
    assert asked(health, range(9, 19)) == [18]


def test_the_fourth_return_is_the_end() -> None:
    health = DivergenceGuard()
    for _ in range(3):
        health.rolled_back()
    with pytest.raises(DivergedError, match=r"a lower online\.lr or critic\.lr"):
        health.rolled_back()
    assert health.rollbacks == 3


def test_what_was_counted_goes_on_from_its_numbers() -> None:
    before = DivergenceGuard()
    asked(before, range(50, 59))
    after = DivergenceGuard(before.recent, rollbacks=2)
    assert after.skipped(59)
    assert after.rollbacks == 2
