"""The gate at which collecting and learning wait: bounded, counted, measured."""

import logging
from fractions import Fraction
from itertools import count
from threading import Thread
from typing import Any

import pytest

from replay.gate import Gate
from replay.limiter import Limiter
from tests.test_limiter import band

SOON, NEVER = 30.0, 1e6  # seconds: only a failure waits so long


def gate(**fields: Any) -> Gate:
    """Nothing inserted, nothing sampled; a clock that goes on by 3 whenever it is looked at."""
    ticks = count(step=3)
    return Gate(Limiter(band(10, 28)), clock=lambda: float(next(ticks)), **fields)


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
    some = Gate(Limiter(band(10, 28)))
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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_actors_a_learner_may_go_on_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    some = Gate(Limiter(band(10, 28)), without_actors="continue_offline", patience=60, clock=clock)
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


def test_an_actor_that_is_refused_is_not_gone() -> None:
    clock = Clock()
    full = Limiter(band(10, 28), inserts=14)
    some = Gate(full, without_actors="continue_offline", patience=60, clock=clock)
    clock.now += 59
    assert not some.insert(5, 0)
    clock.now += 59
    assert [some.sample(0) for _ in range(3)] == [True, True, False]
    assert (some.limiter.samples, some.offline) == (16, False)


def test_what_is_allowed_counts_as_ever_while_actors_are_gone() -> None:
    clock = Clock()
    some = Gate(
        Limiter(band(10, 28), inserts=14),
        without_actors="continue_offline",
        patience=60,
        clock=clock,
    )
    clock.now += 1000
    assert some.sample(0)
    assert (some.limiter.samples, some.offline_samples, some.offline) == (8, 0, False)


def test_a_learner_that_is_told_to_wait_waits() -> None:
    clock = Clock()
    some = Gate(Limiter(band(10, 28)), clock=clock)
    clock.now += 10**6
    assert not some.sample(0)
