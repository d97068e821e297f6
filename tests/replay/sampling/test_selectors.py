"""Which episodes may be drawn and how often: weights small enough to write down."""

from dataclasses import replace

import numpy as np
import pytest

from m3pc.types import InputError
from replay.sampling.selectors import (
    RECENCY_UNIT,
    Selection,
    alike,
    best,
    best_steps,
    by_length,
    by_pieces,
    newest_steps,
    only,
    product,
    recent,
    weights,
)
from tests.support.episodes.episodes import numbered
from tests.support.episodes.live_view import LiveStore, live

# The return of an episode of L steps is L (L + 1) / 2: the longer, the better.
LENGTHS = [5, 3, 9, 4, 12, 9]


def weigh(selection: Selection, *, withdrawn: tuple[int, ...] = (), length: int = 1) -> list[int]:
    store = live(LENGTHS, cut=2)
    store.withdraw(*withdrawn)
    return list(weights(store.view(), selection, length=length))


def test_by_pieces_an_episode_counts_as_often_as_it_holds_one() -> None:
    assert weigh(by_pieces(4), length=4) == [2, 0, 6, 1, 9, 6]
    assert weigh(by_pieces(1)) == LENGTHS


def test_by_length_an_episode_counts_by_its_steps() -> None:
    assert weigh(by_length) == LENGTHS


def test_alike_every_episode_counts_the_same() -> None:
    assert weigh(alike) == [1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("selection", [by_length, alike, best(6), recent(1)])
def test_an_episode_too_short_for_a_piece_has_no_weight_anywhere(selection: Selection) -> None:
    found = weigh(selection, length=5)
    assert [x > 0 for x in found] == [True, False, True, False, True, True]


def test_the_best_are_those_of_highest_return_and_of_equal_ones_the_older() -> None:
    assert weigh(best(2)) == [0, 0, 1, 0, 1, 0]
    assert weigh(best(3)) == [0, 0, 1, 0, 1, 1]


def test_the_best_may_be_fewer_than_asked_for() -> None:
    assert weigh(best(100, minimum=5)) == [1, 0, 1, 0, 1, 1]
    assert weigh(best(100, minimum=13)) == [0] * 6


def test_the_best_are_chosen_among_those_that_are_long_enough_and_may_be_chosen() -> None:
    may = only(np.array([True, True, False, True, False, True]))
    assert weigh(best(2, among=may)) == [1, 0, 0, 0, 0, 1]
    # Of losses the shortest would be best, were it long enough.
    losses = [numbered(number, length) for number, length in enumerate([3, 5, 4])]
    store = LiveStore([replace(episode, rewards=-episode.rewards) for episode in losses])
    assert weights(store.view(), best(1, minimum=4), length=1).tolist() == [0, 0, 1]


def test_a_withdrawn_episode_has_no_weight_and_takes_no_place_among_the_best() -> None:
    assert weigh(by_length, withdrawn=(0, 4)) == [0, 3, 9, 4, 0, 9]
    assert weigh(best(2), withdrawn=(4,)) == [0, 0, 1, 0, 0, 1]
    assert weigh(best_steps(18), withdrawn=(4,)) == [0, 0, 1, 0, 0, 1]
    assert weigh(newest_steps(16), withdrawn=(5,)) == [0, 0, 0, 1, 1, 0]


def test_best_steps_are_whole_episodes_within_the_limit() -> None:
    assert weigh(best_steps(21)) == [0, 0, 1, 0, 1, 0]
    assert weigh(best_steps(29)) == [0, 0, 1, 0, 1, 0]
    assert weigh(best_steps(30)) == [0, 0, 1, 0, 1, 1]
    assert weigh(best_steps(10**9)) == [1] * 6


def test_newest_steps_are_whole_episodes_within_the_limit() -> None:
    assert weigh(newest_steps(20)) == [0, 0, 0, 0, 0, 1]
    assert weigh(newest_steps(21)) == [0, 0, 0, 0, 1, 1]
    assert weigh(newest_steps(10**9)) == [1] * 6


def test_a_limit_below_one_episode_keeps_one() -> None:
    assert weigh(newest_steps(1)) == [0, 0, 0, 0, 0, 1]
    assert weigh(best_steps(1)) == [0, 0, 0, 0, 1, 0]


def test_recent_episodes_count_twice_those_a_half_life_before() -> None:
    unit = RECENCY_UNIT
    assert weigh(recent(1)) == [unit // 32, unit // 16, unit // 8, unit // 4, unit // 2, unit]
    assert weigh(recent(2))[::-2] == [unit, unit // 2, unit // 4]
    assert weigh(recent(0.5))[-3:] == [unit // 16, unit // 4, unit]


def test_recency_gives_nothing_to_what_is_24_half_lives_old() -> None:
    found = weights(live([1] * 30, cut=30).view(), recent(1), length=1)
    assert found[-25:].tolist() == [1 << power for power in range(25)]
    assert not found[:-25].any()


@pytest.mark.parametrize("half_life", [0, -1, float("nan")])
def test_a_half_life_that_is_no_time_is_refused(half_life: float) -> None:
    with pytest.raises(InputError, match="give a number above 0"):
        recent(half_life)


def test_a_product_of_selections_multiplies_weights() -> None:
    assert weigh(product(best(2), by_length)) == [0, 0, 9, 0, 12, 0]
    assert weigh(product(only(np.array([1, 1, 0, 0, 0, 0], bool)), by_length)) == [5, 3, 0, 0, 0, 0]
    assert weigh(product()) == [1] * 6


def test_no_episode_is_no_weight() -> None:
    empty = live([]).view()
    for selection in (by_length, alike, by_pieces(4), best(3), recent(5), newest_steps(9)):
        assert weights(empty, selection, length=4).tolist() == []


def test_weights_too_large_to_add_are_refused() -> None:
    view = live([1] * 4).view()
    with pytest.raises(InputError, match=r"sum to 9\.22e"):
        weights(view, lambda v: np.full(len(v.lengths), 1 << 61), length=1)
    with pytest.raises(InputError, match="the least is -1"):
        weights(view, lambda v: np.full(len(v.lengths), -1), length=1)


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
def test_weights_do_not_depend_on_how_episodes_lie_in_segments(cut: int) -> None:
    chain = product(best(4), by_length, recent(3))
    one, other = (live(LENGTHS, cut=n).view() for n in (cut, 6))
    assert weights(one, chain, length=4).tolist() == weights(other, chain, length=4).tolist()
