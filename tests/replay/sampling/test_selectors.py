"""Which episodes may be drawn and how often: weights small enough to write down."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from m3pc.types import InputError
from replay.sampling.selectors import (
    Selector,
    best_steps,
    by_length,
    by_return,
    by_windows,
    episode_weights,
    newest_steps,
    only,
    product,
    uniform,
)
from tests.support.episodes.episodes import numbered
from tests.support.episodes.live_view import LiveStore, live

# The return of an episode of L steps is L (L + 1) / 2: the longer, the better.
LENGTHS = [5, 3, 9, 4, 12, 9]


def weigh(selector: Selector, *, withdrawn: tuple[int, ...] = (), length: int = 1) -> list[int]:
    store = live(LENGTHS, cut=2)
    store.withdraw(*withdrawn)
    return list(episode_weights(store.view(), selector, length=length))


def test_by_windows_an_episode_counts_as_often_as_it_holds_one() -> None:
    assert weigh(by_windows(4), length=4) == [2, 0, 6, 1, 9, 6]
    assert weigh(by_windows(1)) == LENGTHS


def test_by_length_an_episode_counts_by_its_steps() -> None:
    assert weigh(by_length) == LENGTHS


def test_uniform_every_episode_counts_the_same() -> None:
    assert weigh(uniform) == [1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("selector", [by_length, uniform, best_steps(10**9)])
def test_an_episode_too_short_for_a_window_has_no_weight_anywhere(selector: Selector) -> None:
    weights = weigh(selector, length=5)
    assert [x > 0 for x in weights] == [True, False, True, False, True, True]


def ranked(*, withdrawn: tuple[int, ...] = (), **options: Any) -> list[int]:
    store = live(LENGTHS, cut=2)
    store.withdraw(*withdrawn)
    return [int(number) for number in by_return(store.view(), **options)]


def test_the_best_come_first_and_of_equal_ones_the_older() -> None:
    assert ranked() == [4, 2, 5, 0, 3, 1]


def test_only_episodes_that_are_long_enough_and_may_be_chosen_are_ranked() -> None:
    assert ranked(min_length=5) == [4, 2, 5, 0]
    assert ranked(min_length=13) == []
    mask = np.array([True, True, False, True, False, True])
    assert ranked(among=only(mask)) == [5, 0, 3, 1]
    # Of losses the shortest would be best, were it long enough.
    losses = [numbered(number, length) for number, length in enumerate([3, 5, 4])]
    store = LiveStore([replace(episode, rewards=-episode.rewards) for episode in losses])
    assert by_return(store.view(), min_length=4).tolist() == [2, 1]


def test_a_withdrawn_episode_has_no_weight_and_takes_no_place_among_the_best() -> None:
    assert weigh(by_length, withdrawn=(0, 4)) == [0, 3, 9, 4, 0, 9]
    assert ranked(withdrawn=(4,)) == [2, 5, 0, 3, 1]
    assert weigh(best_steps(18), withdrawn=(4,)) == [0, 0, 1, 0, 0, 1]
    assert weigh(newest_steps(16), withdrawn=(5,)) == [0, 0, 0, 1, 1, 0]


def test_best_steps_are_complete_episodes_within_the_limit() -> None:
    assert weigh(best_steps(21)) == [0, 0, 1, 0, 1, 0]
    assert weigh(best_steps(29)) == [0, 0, 1, 0, 1, 0]
    assert weigh(best_steps(30)) == [0, 0, 1, 0, 1, 1]
    assert weigh(best_steps(10**9)) == [1] * 6


def test_newest_steps_are_complete_episodes_within_the_limit() -> None:
    assert weigh(newest_steps(20)) == [0, 0, 0, 0, 0, 1]
    assert weigh(newest_steps(21)) == [0, 0, 0, 0, 1, 1]
    assert weigh(newest_steps(10**9)) == [1] * 6


def test_a_limit_below_one_episode_keeps_one() -> None:
    assert weigh(newest_steps(1)) == [0, 0, 0, 0, 0, 1]
    assert weigh(best_steps(1)) == [0, 0, 0, 0, 1, 0]


def test_a_product_of_selectors_multiplies_weights() -> None:
    assert weigh(product(best_steps(21), by_length)) == [0, 0, 9, 0, 12, 0]
    assert weigh(product(only(np.array([1, 1, 0, 0, 0, 0], bool)), by_length)) == [5, 3, 0, 0, 0, 0]
    assert weigh(product()) == [1] * 6


def test_a_view_without_episodes_has_no_weights() -> None:
    empty = live([]).view()
    for selector in (by_length, uniform, by_windows(4), best_steps(9), newest_steps(9)):
        assert episode_weights(empty, selector, length=4).tolist() == []


def test_weights_too_large_to_add_are_refused() -> None:
    view = live([1] * 4).view()
    with pytest.raises(InputError, match=r"sum to 9\.22e"):
        episode_weights(view, lambda v: np.full(len(v.lengths), 1 << 61), length=1)
    with pytest.raises(InputError, match="the smallest is -1"):
        episode_weights(view, lambda v: np.full(len(v.lengths), -1), length=1)


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
def test_weights_do_not_depend_on_how_episodes_lie_in_segments(cut: int) -> None:
    chain = product(best_steps(34), by_length)
    one, other = (live(LENGTHS, cut=n).view() for n in (cut, 6))
    assert (
        episode_weights(one, chain, length=4).tolist()
        == episode_weights(other, chain, length=4).tolist()
    )
