"""The limiter limiter at which collecting and learning wait: bounded, counted, logged."""

import logging
from fractions import Fraction
from threading import Event, Lock, Thread
from typing import Any

import pytest

from m3pc.types import FencedError
from replay.server.rate_limiter import RateLimiter
from replay.server.sample_ratio import RateLimits, SampleInsertRatio

SOON, NEVER = 30.0, 1e6  # seconds: only a failure waits so long
LIMITS = RateLimits(  # ten inserts come first; then the error stays from 10 to 28
    samples_per_insert=Fraction(2),
    batch=8,
    max_insert=5,
    min_size=10,
    min_diff=Fraction(10),
    max_diff=Fraction(28),
)


def new_limiter(inserts: int = 0, **options: Any) -> RateLimiter:
    return RateLimiter(SampleInsertRatio(LIMITS, inserts), **options)


def insert(limiter: RateLimiter, count: int, timeout: float = 0.0) -> bool:
    """Reserve, and settle at once: all of it is stored."""
    allowed = limiter.reserve(count, timeout)
    if allowed:
        limiter.settle(count, limiter.ratio.inserts + count)
    return allowed


def test_the_limiter_counts_what_it_allows_and_nothing_else() -> None:
    limiter = new_limiter()
    assert limiter.grant(1, 0, 8, 0) == 0
    assert [insert(limiter, 5) for _ in range(4)] == [True, True, False, False]
    assert limiter.grant(1, 0, 8, 0) == 8
    assert (limiter.ratio.inserts, limiter.ratio.samples) == (10, 8)


def test_a_wait_ends_with_its_timeout() -> None:
    limiter = new_limiter(inserts=10)
    assert limiter.reserve(5, 0.001) is False
    assert limiter.grant(1, 0, 10, 0.001) == 10
    assert limiter.grant(1, 10, 11, 0.001) == 10


def test_a_learner_that_waits_is_woken_by_the_insert_that_it_needs() -> None:
    limiter, granted = new_limiter(), []
    thread = Thread(target=lambda: granted.append(limiter.grant(1, 0, 8, SOON)))
    thread.start()
    assert insert(limiter, 5, SOON) and insert(limiter, 5, SOON)
    thread.join(SOON)
    assert granted == [8]


def test_an_actor_that_waits_is_woken_by_the_samples_that_make_room() -> None:
    limiter, allowed = new_limiter(inserts=10), []
    thread = Thread(target=lambda: allowed.append(limiter.reserve(5, SOON)))
    thread.start()
    assert limiter.grant(1, 0, 8, SOON) == 8
    thread.join(SOON)
    assert allowed == [True]


def test_many_threads_never_leave_the_band() -> None:
    limiter, total = new_limiter(), 298 * 8
    errors: list[Fraction] = []
    lock = Lock()

    def store() -> None:
        for _ in range(100):
            assert limiter.reserve(3, SOON)
            with lock:
                limiter.settle(3, limiter.ratio.inserts + 3)

    def learn() -> None:
        done = 0
        while done < total:
            granted = limiter.grant(1, done, min(done + 8, total), SOON)
            assert granted > done
            done = granted
            errors.append(limiter.ratio.error)

    threads = [Thread(target=work) for work in (*[store] * 4, *[learn] * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert (limiter.ratio.inserts, limiter.ratio.samples) == (1200, total)
    assert all(10 <= error <= 28 for error in errors)


def test_what_is_reserved_counts_for_those_who_insert_and_not_for_those_who_sample() -> None:
    limiter = new_limiter()
    assert [limiter.reserve(5, 0) for _ in range(3)] == [True, True, False]
    assert limiter.ratio.inserts == 0
    assert limiter.grant(1, 0, 8, 0) == 0  # nothing of it is stored yet
    limiter.settle(5, 5)
    limiter.settle(5, 5)  # it was not stored: its place is free again
    assert [limiter.reserve(5, 0) for _ in range(2)] == [True, False]


def test_settling_in_the_wrong_order_forgets_nothing() -> None:
    limiter = new_limiter()
    assert limiter.reserve(3, 0) and limiter.reserve(4, 0)
    limiter.settle(4, 7)
    limiter.settle(3, 3)
    assert limiter.ratio.inserts == 7


def test_a_short_episode_does_not_take_the_room_that_a_long_one_waits_for() -> None:
    limiter = new_limiter(inserts=10)  # room for 4, the longest is 5
    assert [limiter.reserve(count, 0) for count in (5, 1)] == [False, False]


def test_an_append_that_waits_for_room_is_counted_as_waiting() -> None:
    limiter, seen = new_limiter(inserts=14), Event()

    def wait() -> None:
        if limiter.reserve(5, SOON):
            seen.set()

    thread = Thread(target=wait)
    thread.start()
    while not limiter.waiting:
        assert thread.is_alive()
    assert limiter.grant(1, 0, 16, SOON) == 16
    thread.join(SOON)
    assert (seen.is_set(), limiter.waiting) == (True, 0)


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
    limiter = fifths()
    assert [limiter.grant(1, 0, total, 0) for total in (1, 2, 3, 9)] == [1, 2, 2, 2]
    assert insert(limiter, 10)
    assert limiter.grant(1, 0, 9, 0) == 4
    assert limiter.ratio.samples == 4


def test_asking_again_changes_nothing() -> None:
    limiter = fifths(inserts=50)
    assert [limiter.grant(1, 0, 7, 0) for _ in range(3)] == [7, 7, 7]
    assert limiter.grant(1, 0, 5, 0) == 5  # an older question that was under way for long
    assert limiter.ratio.samples == 7


def test_asking_twice_at_once_counts_once() -> None:
    limiter, answers = fifths(), []
    threads = [
        Thread(target=lambda: answers.append(limiter.grant(1, 0, 4, SOON))) for _ in range(2)
    ]
    assert limiter.grant(1, 0, 2, 0) == 2
    for thread in threads:
        thread.start()
    assert insert(limiter, 10)
    for thread in threads:
        thread.join(SOON)
    assert (answers, limiter.ratio.samples) == ([4, 4], 4)


def test_a_learner_that_lost_updates_does_them_again() -> None:
    limiter = fifths(inserts=50)
    assert limiter.grant(1, 0, 12, 0) == 12
    assert limiter.grant(2, 5, 5, 0) == 5
    assert limiter.ratio.samples == 5
    assert limiter.grant(2, 5, 99, 0) == 12


def test_an_older_learner_is_refused_also_while_it_waits() -> None:
    limiter, answers = fifths(), []

    def old() -> None:
        try:
            limiter.grant(1, 0, 99, SOON)
        except FencedError as error:
            answers.append(str(error))

    assert limiter.grant(1, 0, 2, 0) == 2
    thread = Thread(target=old)
    thread.start()
    assert limiter.grant(2, 1, 1, 0) == 1
    thread.join(SOON)
    assert len(answers) == 1 and "epoch 2 has begun" in answers[0]
    with pytest.raises(FencedError):
        limiter.grant(1, 0, 1, 0)


def test_a_new_limiter_believes_what_the_learner_says() -> None:
    limiter = fifths(inserts=50)
    assert not limiter.reserve(10, 0)  # as far as it knows, ten updates are owed
    assert limiter.grant(3, 10, 10, 0) == 10
    assert limiter.reserve(10, 0)


def test_a_learner_that_did_more_than_is_allowed_waits_for_the_actors() -> None:
    limiter = fifths(inserts=50)
    assert limiter.grant(3, 20, 20, 0) == 12
    assert insert(limiter, 10) and limiter.grant(3, 20, 20, 0) == 14


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_actors_a_learner_may_go_on_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    limiter = new_limiter(without_actors="continue_offline", patience=60, clock=clock)
    clock.now += 59
    assert limiter.grant(1, 0, 8, 0) == 0
    assert not limiter.offline
    clock.now += 1
    assert [limiter.grant(1, 0, total, NEVER) for total in (8, 16)] == [8, 16]  # at once
    assert limiter.offline
    assert caplog.text.count("event=continue-offline silent_s=60") == 1
    assert limiter.offline_samples == 16
    assert limiter.ratio.samples == 0  # the actors do not have to make up for it
    assert insert(limiter, 5)
    assert not limiter.offline
    assert "event=actors-back offline_samples=16" in caplog.text
    assert limiter.grant(1, 16, 24, 0) == 16
    clock.now += 60
    assert limiter.grant(1, 16, 24, 0) == 24
    assert caplog.text.count("event=continue-offline") == 2


def test_updates_without_actors_are_granted_beside_the_band() -> None:
    clock = Clock()
    limiter = fifths(without_actors="continue_offline", patience=60, clock=clock)
    assert limiter.grant(1, 0, 2, 0) == 2
    assert limiter.grant(1, 0, 10, 0) == 2
    clock.now += 60
    assert limiter.grant(1, 0, 10, NEVER) == 10  # at once
    assert (limiter.ratio.samples, limiter.offline_samples, limiter.granted) == (2, 8, 10)
    assert insert(limiter, 10)
    assert limiter.grant(1, 0, 20, 0) == 12  # the two that are owed
    assert (limiter.ratio.samples, limiter.offline) == (4, False)


def test_a_new_limiter_does_not_count_updates_without_actors_in_the_ratio() -> None:
    limiter = fifths(inserts=50, without_actors="continue_offline")
    assert [limiter.grant(1, 100, 116, 0) for _ in range(2)] == [100, 100]
    assert (limiter.ratio.samples, limiter.offline_samples) == (12, 88)
    assert insert(limiter, 10) and limiter.grant(1, 100, 116, 0) == 102


def test_a_new_limiter_grants_only_what_is_owed() -> None:
    """What a learner wants is not what it has done, though it may go on without actors."""
    limiter = fifths(without_actors="continue_offline")
    assert [limiter.grant(1, 0, 16, 0) for _ in range(2)] == [2, 2]  # ahead of the actors by two
    assert (limiter.ratio.samples, limiter.offline_samples) == (2, 0)
    assert limiter.grant(2, 1, 17, 0) == 2  # a learner that comes back is owed no more


def test_an_actor_that_is_refused_is_not_gone() -> None:
    clock = Clock()
    limiter = new_limiter(inserts=14, without_actors="continue_offline", patience=60, clock=clock)
    clock.now += 59
    assert not insert(limiter, 5)
    clock.now += 59
    assert limiter.grant(1, 0, 99, 0) == 18
    assert (limiter.ratio.samples, limiter.offline) == (18, False)


def test_what_is_allowed_counts_as_ever_while_actors_are_gone() -> None:
    clock = Clock()
    limiter = new_limiter(inserts=14, without_actors="continue_offline", patience=60, clock=clock)
    clock.now += 1000
    assert limiter.grant(1, 0, 8, 0) == 8
    assert (limiter.ratio.samples, limiter.offline_samples, limiter.offline) == (8, 0, False)


def test_a_learner_that_must_wait_for_actors_waits() -> None:
    clock = Clock()
    limiter = new_limiter(clock=clock)
    clock.now += 10**6
    assert limiter.grant(1, 0, 8, 0) == 0
