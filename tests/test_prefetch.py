"""Batches drawn ahead: in order, bounded, without a thread left behind. Nothing here sleeps."""

import gc
import threading
import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from m3pc.returns import ReturnRule
from m3pc.types import InputError
from replay.mixture import Mixture, Source, fixed
from replay.prefetch import Prefetch
from replay.sampler import PieceColumns
from replay.selection import alike
from tests.episodes import numbered
from tests.live_view import live

SOON = 30.0  # seconds: longer than anything here takes; only a failure waits so long


class Batch:
    """As good as arrays."""

    def __init__(self) -> None:
        self.update = -1
        self.look = -1


class Draws:
    """Says what it is asked for; draws only as many batches as it was allowed to."""

    def __init__(self, look: int = 0, *, allowed: int = 10**6, fails_at: int = -1) -> None:
        self.look, self.fails_at = look, fails_at
        self.tickets = threading.Semaphore(allowed)
        self.started: list[int] = []
        self._begun = threading.Semaphore(0)
        self.made = 0

    def batch(self, update: int, out: Batch | None = None) -> Batch:
        self.started.append(update)
        self._begun.release()
        assert self.tickets.acquire(timeout=SOON)
        if update == self.fails_at:
            raise InputError(f"update {update} cannot be drawn")
        self.made += out is None
        found = out or Batch()
        found.update, found.look = update, self.look
        return found

    def wait_for(self, batches: int) -> None:
        """Until so many more have begun."""
        assert all(self._begun.acquire(timeout=SOON) for _ in range(batches))

    def later(self) -> "Draws":
        self.look += 1
        return self


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_batches_come_in_the_order_of_updates() -> None:
    with Prefetch(Draws(), first=7) as prefetch:
        assert [prefetch.take(SOON).update for _ in range(20)] == list(range(7, 27))
        assert prefetch.taken == 20


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_arrays_are_made_once_and_used_again(ahead: int) -> None:
    draws = Draws()
    with Prefetch(draws, first=0, ahead=ahead) as prefetch:
        taken = [prefetch.take(SOON) for _ in range(50)]
    assert draws.made == len(set(map(id, taken))) == ahead + 1


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_batch_is_not_touched_before_the_next_one_is_asked_for(ahead: int) -> None:
    draws = Draws()
    with Prefetch(draws, first=0, ahead=ahead) as prefetch:
        draws.wait_for(ahead)
        for update in range(20):
            taken = prefetch.take(SOON)
            draws.wait_for(1)  # the last that may be drawn meanwhile
            assert (taken.update, draws.started[-1]) == (update, update + ahead)


def test_no_more_is_drawn_ahead_than_may_be() -> None:
    draws = Draws()
    with Prefetch(draws, first=0, ahead=3) as prefetch:
        draws.wait_for(3)
    assert draws.started == [0, 1, 2]
    assert prefetch.taken == 0


def test_stores_are_looked_at_anew_at_every_multiple() -> None:
    with Prefetch(Draws(), first=5, refresh=4) as prefetch:
        assert [prefetch.take(SOON).look for _ in range(9)] == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_a_run_that_starts_at_a_multiple_looks_first() -> None:
    with Prefetch(Draws(), first=8, refresh=4) as prefetch:
        assert prefetch.take(SOON).look == 1


def test_what_goes_wrong_is_told_after_the_batches_before_it_and_ever_after() -> None:
    with Prefetch(Draws(fails_at=2), first=0, ahead=4) as prefetch:
        assert [prefetch.take(SOON).update for _ in range(2)] == [0, 1]
        for _ in range(3):
            with pytest.raises(InputError, match="update 2 cannot be drawn"):
                prefetch.take(SOON)


def test_waiting_ends_and_the_batch_still_comes() -> None:
    draws = Draws(allowed=0)
    with Prefetch(draws, first=0, ahead=1) as prefetch:
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"no batch came in 0\.001 s"):
                prefetch.take(0.001)
        draws.tickets.release(10)
        assert [prefetch.take(SOON).update for _ in range(4)] == [0, 1, 2, 3]
    assert draws.made == 2  # asking again in vain made no room for more


def test_the_time_that_the_learner_waited_is_measured() -> None:
    ticks, draws = count(), Draws(allowed=2)
    with Prefetch(draws, first=0, clock=lambda: float(next(ticks))) as prefetch:
        prefetch.take(SOON)
        prefetch.take(SOON)
        assert prefetch.waited == 2.0  # the clock ticks at each look
        with pytest.raises(TimeoutError):
            prefetch.take(0.001)
        assert prefetch.waited == 3.0
        draws.tickets.release(10)


def test_closing_waits_a_while_for_the_batch_that_is_drawn_and_draws_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draws = Draws(allowed=0)
    with Prefetch(draws, first=0, ahead=5) as prefetch:
        draws.wait_for(1)
        prefetch.close(timeout=0.001)
        assert "event=prefetch-stuck" in caplog.text
        draws.tickets.release(10)
    assert draws.started == [0]
    with pytest.raises(RuntimeError, match="closed"):
        prefetch.take(SOON)


def test_an_error_in_the_learner_ends_the_thread() -> None:
    with pytest.raises(KeyError), Prefetch(Draws(), first=0):
        raise KeyError


def mixture(store: Any, batch: int = 8) -> Any:
    source = Source(name="some", view=store.view(), selection=alike, share=fixed(1.0))
    columns = PieceColumns(4, ReturnRule(horizon=100))
    return Mixture([source], columns, batch=batch, seed=0)


def test_prefetched_batches_are_those_that_the_mixture_draws() -> None:
    store = live([5, 9, 6])
    with Prefetch(mixture(store), first=3, refresh=2) as prefetch:
        for update in range(3, 20):
            found, plain = prefetch.take(SOON), mixture(store).batch(update)
            assert all(
                np.array_equal(getattr(found, name), getattr(plain, name))
                for name in plain.__slots__
            )


def test_new_segments_are_seen_and_dropped_ones_let_go() -> None:
    store = live([5, 9, 6])
    dropped = weakref.ref(store.view().segments[0].states)
    with Prefetch(mixture(store, batch=64), first=1, ahead=1, refresh=10) as prefetch:
        assert set(prefetch.take(SOON).states[..., 0].flat) == {0, 1, 2}
        store.drop()
        store.append(numbered(100, 7))
        for _ in range(11):
            last = prefetch.take(SOON)
        assert set(last.states[..., 0].flat) == {1, 2, 100}
        gc.collect()
        assert dropped() is None
