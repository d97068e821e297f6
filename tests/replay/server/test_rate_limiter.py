"""The gate at which collecting and learning wait: bounded, counted, measured."""

import logging
from fractions import Fraction
from itertools import count
from threading import Event, Thread
from typing import Any

import pytest

from m3pc.types import FencedError
from replay.server.rate_limiter import RateLimiter
from replay.server.sample_ratio import RateLimits, SampleInsertRatio
from tests.replay.server.test_sample_ratio import band

SOON, NEVER = 30.0, 1e6  # seconds: only a failure waits so long


def gate(**fields: Any) -> RateLimiter:
    """Nothing inserted, nothing sampled; a clock that goes on by 3 whenever it is looked at."""
    ticks = count(step=3)
    return RateLimiter(SampleInsertRatio(band(10, 28)), clock=lambda: float(next(ticks)), **fields)


def test_the_gate_counts_what_it_allows_and_nothing_else() -> None:
    some = gate()
    assert not some.sample(0)
    assert [some.insert(5, 0) for _ in range(4)] == [True, True, False, False]
    assert some.sample(0)
    assert (some.limiter.inserts, some.limiter.samples) == (10, 8)


def test_the_gate_measures_how_long_each_side_waited() -> None:
    some = gate()
    some.sample(0)
    assert (some.insert_waited, some.sample_waited) == (0, 3)
    some.insert(5, 0)
    some.insert(5, 0)
    assert (some.insert_waited, some.sample_waited) == (6, 3)


@pytest.mark.parametrize("side", ["insert", "sample"])
def test_a_wait_ends_with_its_timeout(side: str) -> None:
    some = gate()
    for _ in range(2):
        some.insert(5, 0)
    if side == "insert":
        assert some.insert(5, 0.001) is False
    else:
        assert some.sample(0.001) is True
        assert some.sample(0.001) is False


def test_a_learner_that_waits_is_woken_by_the_insert_that_it_needs() -> None:
    some, found = gate(), []
    thread = Thread(target=lambda: found.append(some.sample(SOON)))
    thread.start()
    assert some.insert(5, SOON) and some.insert(5, SOON)
    thread.join(SOON)
    assert found == [True]


def test_an_actor_that_waits_is_woken_by_the_batch_that_makes_room() -> None:
    some, found = gate(), []
    assert some.insert(5) and some.insert(5)
    thread = Thread(target=lambda: found.append(some.insert(5, SOON)))
    thread.start()
    assert some.sample(SOON)
    thread.join(SOON)
    assert found == [True]


def test_many_threads_never_leave_the_band() -> None:
    some = RateLimiter(SampleInsertRatio(band(10, 28)))
    errors: list[Fraction] = []

    def insert() -> None:
        for _ in range(100):
            assert some.insert(3, SOON)

    def sample() -> None:
        for _ in range(149):
            assert some.sample(SOON)
            errors.append(some.limiter.error)

    threads = [Thread(target=work) for work in (*[insert] * 4, *[sample] * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert (some.limiter.inserts, some.limiter.samples) == (1200, 298 * 8)
    assert all(10 <= error <= 28 for error in errors)


def test_what_is_reserved_counts_for_those_who_insert_and_not_for_those_who_sample() -> None:
    some = gate()
    assert [some.reserve(5, 0) for _ in range(3)] == [True, True, False]
    assert some.limiter.inserts == 0
    assert not some.sample(0)  # nothing of it is stored yet
    some.settle(5, 5)
    some.settle(5, 5)  # it was not stored: its place is free again
    assert [some.reserve(5, 0) for _ in range(2)] == [True, False]


def test_settling_in_the_wrong_order_forgets_nothing() -> None:
    some = gate()
    assert some.reserve(3, 0) and some.reserve(4, 0)
    some.settle(4, 7)
    some.settle(3, 3)
    assert some.limiter.inserts == 7


def test_a_short_episode_does_not_take_the_room_that_a_long_one_waits_for() -> None:
    some = RateLimiter(SampleInsertRatio(band(10, 28), inserts=10))  # room for 4, the longest is 5
    assert [some.reserve(count, 0) for count in (5, 1)] == [False, False]


def test_whoever_waits_for_room_is_seen_waiting() -> None:
    some, seen = RateLimiter(SampleInsertRatio(band(10, 28), inserts=14)), Event()

    def wait() -> None:
        if some.reserve(5, SOON):
            seen.set()

    thread = Thread(target=wait)
    thread.start()
    while not some.waiting:
        assert thread.is_alive()
    assert some.sample(SOON) and some.sample(SOON)
    thread.join(SOON)
    assert (seen.is_set(), some.waiting) == (True, 0)


def fifths(**fields: Any) -> RateLimiter:
    """Five inserts owe one sample; the learner may be ahead by two, the actors by three."""
    limits = RateLimits(
        samples_per_insert=Fraction(1, 5),
        batch=1,
        max_insert=10,
        min_size=0,
        min_diff=Fraction(-2),
        max_diff=Fraction(3),
    )
    return RateLimiter(SampleInsertRatio(limits, inserts=fields.pop("inserts", 0)), **fields)


def test_a_learner_is_granted_what_the_band_allows() -> None:
    some = fifths()
    assert [some.grant(1, 0, total, 0) for total in (1, 2, 3, 9)] == [1, 2, 2, 2]
    assert some.insert(10, 0)
    assert some.grant(1, 0, 9, 0) == 4
    assert some.limiter.samples == 4


def test_asking_again_changes_nothing() -> None:
    some = fifths(inserts=50)
    assert [some.grant(1, 0, 7, 0) for _ in range(3)] == [7, 7, 7]
    assert some.grant(1, 0, 5, 0) == 5  # an older question that was under way for long
    assert some.limiter.samples == 7


def test_asking_twice_at_once_counts_once() -> None:
    some, found = fifths(), []
    threads = [Thread(target=lambda: found.append(some.grant(1, 0, 4, SOON))) for _ in range(2)]
    assert some.grant(1, 0, 2, 0) == 2
    for thread in threads:
        thread.start()
    assert some.insert(10, 0)
    for thread in threads:
        thread.join(SOON)
    assert (found, some.limiter.samples) == ([4, 4], 4)


def test_a_learner_that_lost_updates_does_them_again() -> None:
    some = fifths(inserts=50)
    assert some.grant(1, 0, 12, 0) == 12
    assert some.grant(2, 5, 5, 0) == 5
    assert some.limiter.samples == 5
    assert some.grant(2, 5, 99, 0) == 12


def test_an_older_learner_is_refused_also_while_it_waits() -> None:
    some, found = fifths(), []

    def old() -> None:
        try:
            some.grant(1, 0, 99, SOON)
        except FencedError as error:
            found.append(str(error))

    assert some.grant(1, 0, 2, 0) == 2
    thread = Thread(target=old)
    thread.start()
    assert some.grant(2, 1, 1, 0) == 1
    thread.join(SOON)
    assert len(found) == 1 and "epoch 2 has begun" in found[0]
    with pytest.raises(FencedError):
        some.grant(1, 0, 1, 0)


def test_a_gate_made_anew_believes_what_the_learner_says() -> None:
    some = fifths(inserts=50)
    assert not some.reserve(10, 0)  # as far as it knows, ten updates are owed
    assert some.grant(3, 10, 10, 0) == 10
    assert some.reserve(10, 0)


def test_a_learner_that_did_more_than_is_allowed_waits_for_the_actors() -> None:
    some = fifths(inserts=50)
    assert some.grant(3, 20, 20, 0) == 12
    assert some.insert(10, 0) and some.grant(3, 20, 20, 0) == 14


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_actors_a_learner_may_go_on_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    some = RateLimiter(
        SampleInsertRatio(band(10, 28)), without_actors="continue_offline", patience=60, clock=clock
    )
    clock.now += 59
    assert not some.sample(0)
    assert not some.offline
    clock.now += 1
    assert some.sample(NEVER) and some.sample(NEVER)  # at once
    assert some.offline
    assert caplog.text.count("event=continue-offline silent_s=60") == 1
    assert some.offline_samples == 16
    assert some.limiter.samples == 0  # the actors do not have to make up for it
    assert some.insert(5, 0)
    assert not some.offline
    assert "event=actors-back offline_samples=16" in caplog.text
    assert not some.sample(0)
    clock.now += 60
    assert some.sample(0)
    assert caplog.text.count("event=continue-offline") == 2


def test_updates_without_actors_are_granted_beside_the_band() -> None:
    clock = Clock()
    some = fifths(without_actors="continue_offline", patience=60, clock=clock)
    assert some.grant(1, 0, 2, 0) == 2
    assert some.grant(1, 0, 10, 0) == 2
    clock.now += 60
    assert some.grant(1, 0, 10, NEVER) == 10  # at once
    assert (some.limiter.samples, some.offline_samples, some.granted) == (2, 8, 10)
    assert some.insert(10, 0)
    assert some.grant(1, 0, 20, 0) == 12  # the two that are owed
    assert (some.limiter.samples, some.offline) == (4, False)


def test_a_gate_made_anew_does_not_hold_updates_without_actors_against_anybody() -> None:
    some = fifths(inserts=50, without_actors="continue_offline")
    assert [some.grant(1, 100, 116, 0) for _ in range(2)] == [100, 100]
    assert (some.limiter.samples, some.offline_samples) == (12, 88)
    assert some.insert(10, 0) and some.grant(1, 100, 116, 0) == 102


def test_a_gate_made_anew_grants_nothing_that_nobody_owes() -> None:
    """What a learner wants is not what it has done, though it may go on without actors."""
    some = fifths(without_actors="continue_offline")
    assert [some.grant(1, 0, 16, 0) for _ in range(2)] == [2, 2]  # ahead of the actors by two
    assert (some.limiter.samples, some.offline_samples) == (2, 0)
    assert some.grant(2, 1, 17, 0) == 2  # a learner that comes back is owed no more


def test_an_actor_that_is_refused_is_not_gone() -> None:
    clock = Clock()
    full = SampleInsertRatio(band(10, 28), inserts=14)
    some = RateLimiter(full, without_actors="continue_offline", patience=60, clock=clock)
    clock.now += 59
    assert not some.insert(5, 0)
    clock.now += 59
    assert [some.sample(0) for _ in range(3)] == [True, True, False]
    assert (some.limiter.samples, some.offline) == (16, False)


def test_what_is_allowed_counts_as_ever_while_actors_are_gone() -> None:
    clock = Clock()
    some = RateLimiter(
        SampleInsertRatio(band(10, 28), inserts=14),
        without_actors="continue_offline",
        patience=60,
        clock=clock,
    )
    clock.now += 1000
    assert some.sample(0)
    assert (some.limiter.samples, some.offline_samples, some.offline) == (8, 0, False)


def test_a_learner_that_is_told_to_wait_waits() -> None:
    clock = Clock()
    some = RateLimiter(SampleInsertRatio(band(10, 28)), clock=clock)
    clock.now += 10**6
    assert not some.sample(0)
