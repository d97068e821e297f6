"""When skipped updates call for a rollback, and when for the end of the run."""

import pytest

from learner.divergence_guard import DivergenceGuard
from m3pc.types import DivergedError


def rollbacks(guard: DivergenceGuard, numbers: range) -> list[int]:
    """Skip these updates; which of them call for a rollback."""
    return [number for number in numbers if guard.skip(number)]


def test_ten_skipped_in_a_row_call_for_a_rollback() -> None:
    assert rollbacks(DivergenceGuard(), range(100, 110)) == [109]


def test_nine_in_a_row_and_one_later_do_not() -> None:
    guard = DivergenceGuard()
    assert rollbacks(guard, range(100, 109)) == []
    assert not guard.skip(110)


def test_more_than_one_in_a_hundred_of_the_last_thousand_call_for_a_rollback() -> None:
    assert (
        rollbacks(DivergenceGuard(), range(0, 1001, 100)) == []
    )  # ten in each thousand, 0 is out of it
    assert rollbacks(DivergenceGuard(), range(0, 1000, 99)) == [990]  # the eleventh


def test_after_a_rollback_the_count_starts_anew() -> None:
    guard = DivergenceGuard(range(9))
    guard.roll_back()
    assert guard.recent == []
    assert rollbacks(guard, range(9, 19)) == [18]


def test_the_fourth_rollback_ends_the_run() -> None:
    guard = DivergenceGuard()
    for _ in range(3):
        guard.roll_back()
    with pytest.raises(DivergedError, match=r"a lower online\.lr or critic\.lr"):
        guard.roll_back()
    assert guard.rollbacks == 3


def test_the_count_continues_from_the_numbers_of_a_checkpoint() -> None:
    before = DivergenceGuard()
    rollbacks(before, range(50, 59))
    after = DivergenceGuard(before.recent, rollbacks=2)
    assert after.skip(59)
    assert after.rollbacks == 2
