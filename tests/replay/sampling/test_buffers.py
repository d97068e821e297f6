"""The paper's buffers: which episodes are in them, and how often each is drawn."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from m3pc.config.schema import ReplayConfig
from m3pc.core.returns import ReturnRule
from m3pc.types import Episode
from replay.sampling.buffers import FirstInFirstOut, trajectory_buffer, transition_buffers
from replay.sampling.mixture import Mixture
from replay.sampling.sampler import WindowBatchBuilder
from replay.sampling.selectors import episode_weights, only
from replay.sampling.transitions import TransitionBatchBuilder
from replay.store.view import JoinedView
from tests.support.episodes.episodes import numbered
from tests.support.episodes.live_view import LiveStore, live

T = 4
LOGGED = [10, 6, 2, 9, 8, 7, 3]  # the longer, the better
RULE = ReturnRule(max_episode_steps=1000)
Slots = tuple[list[int], list[int]]


def slots(offline: LiveStore, online: LiveStore, capacity: int = 4, seed: int = 0) -> Slots:
    buffer = FirstInFirstOut(capacity=capacity, min_length=T, seed=seed)
    logged, collected = buffer.slots(offline.view(), online.view())
    return logged.tolist(), collected.tolist()


def cut(number: int, length: int) -> Episode:
    return replace(numbered(number, length), truncated=False)


def test_at_first_the_buffer_holds_the_best_logged_episodes_that_are_long_enough() -> None:
    assert sorted(slots(live(LOGGED), live([]))[0]) == [0, 3, 4, 5]
    assert sorted(slots(live(LOGGED), live([]), capacity=100)[0]) == [0, 1, 3, 4, 5]


def test_their_order_is_shuffled_by_the_seed() -> None:
    orders = {tuple(slots(live(LOGGED), live([]), seed=seed)[0]) for seed in range(200)}
    assert len(orders) == 24  # all there are
    assert slots(live(LOGGED), live([]), seed=5) == slots(live(LOGGED, cut=3), live([]), seed=5)


def test_each_collected_episode_takes_the_place_of_the_oldest() -> None:
    offline, online = live(LOGGED), live([])
    start = slots(offline, online)[0]
    seen = []
    for number in range(7):
        seen.append(slots(offline, online))
        online.append(numbered(100 + number, 5))
    assert seen == [
        (start, []),
        (start[1:], [0]),
        (start[2:], [0, 1]),
        (start[3:], [0, 1, 2]),
        ([], [0, 1, 2, 3]),
        ([], [1, 2, 3, 4]),
        ([], [2, 3, 4, 5]),
    ]


def test_a_collected_episode_that_is_too_short_takes_no_place() -> None:
    start = slots(live(LOGGED), live([]))[0]
    assert slots(live(LOGGED), live([T - 1, T, T - 1])) == (start[1:], [1])


def test_a_collected_episode_that_was_cut_short_takes_no_place() -> None:
    start = slots(live(LOGGED), live([]))[0]
    online = LiveStore([numbered(100, 5), cut(101, 9)], [cut(102, 9), numbered(103, 6)])
    assert slots(live(LOGGED), online) == (start[2:], [0, 3])
    online.append(numbered(104, 5, terminated=True))
    assert slots(live(LOGGED), online) == (start[3:], [0, 3, 4])


def test_a_logged_episode_that_was_cut_short_has_its_place() -> None:
    logged = [cut(0, 10), numbered(1, 9), numbered(2, 8)]
    assert sorted(slots(LiveStore(logged), live([]), capacity=2)[0]) == [0, 1]


def test_where_all_that_was_collected_was_cut_short_the_logged_ones_are_drawn() -> None:
    offline, online = live([10, 6]), LiveStore([cut(100, 8), cut(101, 9)])
    buffer = trajectory_buffer(offline.view(), online.view(), config(), min_length=T, seed=0)
    windows = Mixture([buffer], WindowBatchBuilder(T, RULE), batch=100, seed=0)
    assert set(windows.batch(0).states[:, 0, 0]) == {0, 1}
    steps = critic(offline, online, online_after=0).batch(0)
    assert set(steps.states[:, 0]) == {0, 1, 100, 101}


def test_a_buffer_that_starts_small_stays_small() -> None:
    start = slots(live([5, 6]), live([]))[0]
    assert slots(live([5, 6]), live([5])) == (start[1:], [0])
    assert slots(live([5, 6]), live([5] * 6)) == ([], [4, 5])


def test_without_logged_episodes_the_collected_ones_fill_it() -> None:
    assert slots(live([]), live([])) == ([], [])
    assert slots(live([]), live([5] * 3)) == ([], [0, 1, 2])
    assert slots(live([T - 1]), live([5] * 6)) == ([], [2, 3, 4, 5])


def test_retention_that_keeps_as_many_as_there_are_slots_changes_nothing() -> None:
    online = live([5] * 6)
    before = slots(live(LOGGED), online)
    online.drop()
    online.drop()
    assert before == ([], [2, 3, 4, 5])
    assert slots(live(LOGGED), online) == ([], [0, 1, 2, 3])  # the same, counted anew


def test_an_episode_that_retention_dropped_no_longer_has_a_slot() -> None:
    online = live([5] * 6)
    for _ in range(3):
        online.drop()
    start = slots(live(LOGGED), live([]))[0]
    assert slots(live(LOGGED), online) == (start[3:], [0, 1, 2])


def test_a_withdrawn_episode_has_no_slot_and_does_not_shuffle_the_others() -> None:
    offline, online = live(LOGGED), live([5, 5])
    start = slots(offline, live([]), capacity=5)[0]
    offline.withdraw(4)
    online.withdraw(0)
    assert slots(offline, live([]), capacity=5)[0] == [number for number in start if number != 4]
    assert slots(offline, online, capacity=4)[1] == [1]


def test_only_episodes_of_the_train_split_are_taken() -> None:
    train = np.array([False, True, True, False, True, True, True])
    buffer = FirstInFirstOut(capacity=2, min_length=T, seed=0, among=only(train))
    assert sorted(buffer.slots(live(LOGGED).view(), live([]).view())[0].tolist()) == [4, 5]


def config(**fields: Any) -> ReplayConfig:
    return ReplayConfig(**fields)


@pytest.mark.parametrize("sampling", ["length", "uniform"])
def test_an_episode_comes_by_its_length_or_as_often_as_any(sampling: str) -> None:
    offline, online = live([10, 6, 2], cut=2), live([5, 8], first=100)
    buffer = trajectory_buffer(
        offline.view(), online.view(), config(episodes=3, sampling=sampling), min_length=T, seed=0
    )
    mix = Mixture([buffer], WindowBatchBuilder(T, RULE), batch=20_000, seed=0)
    drawn = mix.batch(0)
    episodes, counts = np.unique(drawn.states[:, 0, 0], return_counts=True)
    assert set(episodes) == {100.0, 101.0}  # two logged ones were long enough, and are pushed out
    expected = 20_000 * (5 / 13 if sampling == "length" else 1 / 2)
    assert abs(counts[0] - expected) < 6 * 71  # standard deviation at most 71
    # The start is even: 2 places in the first, 5 in the second.
    for episode, places in ((100, 2), (101, 5)):
        firsts = drawn.steps[drawn.states[:, 0, 0] == episode]
        steps, counts_of_steps = np.unique(firsts, return_counts=True)
        assert steps.tolist() == list(range(places))
        assert np.abs(counts_of_steps - len(firsts) / places).max() < 6 * np.sqrt(
            len(firsts) / places
        )


def test_logged_and_collected_episodes_of_the_buffer_are_drawn_together() -> None:
    """By length over both: the share of the logged ones is that of their steps."""
    offline, online = live([10, 10, 10]), live([5], first=100)
    buffer = trajectory_buffer(offline.view(), online.view(), config(), min_length=T, seed=0)
    drawn = Mixture([buffer], WindowBatchBuilder(T, RULE), batch=20_000, seed=0).batch(0)
    collected = int((drawn.states[:, 0, 0] == 100).sum())
    assert abs(collected - 20_000 / 5) < 6 * 57


def test_the_seed_says_which_logged_episodes_go_first() -> None:
    offline, online = live([10, 9, 8, 7]), live([5], first=100)
    orders = set()
    for seed in range(50):
        buffer = trajectory_buffer(offline.view(), online.view(), config(), min_length=T, seed=seed)
        orders.add(tuple(buffer.selector(buffer.view).tolist()))
    assert orders == {
        (0, 9, 8, 7, 5),
        (10, 0, 8, 7, 5),
        (10, 9, 0, 7, 5),
        (10, 9, 8, 0, 5),
    }


def test_the_buffer_follows_what_is_collected() -> None:
    offline, online = live([10, 6]), live([])
    buffer = trajectory_buffer(offline.view(), online.view(), config(), min_length=T, seed=0)
    mix = Mixture([buffer], WindowBatchBuilder(T, RULE), batch=100, seed=0)
    assert set(mix.batch(0).states[:, 0, 0]) == {0, 1}
    online.append(numbered(100, 5), numbered(101, 5))
    assert set(mix.latest().batch(0).states[:, 0, 0]) == {100, 101}


def test_a_joined_view_that_did_not_change_stays_the_same_object() -> None:
    offline, online = live([10, 6]), live([5])
    both = JoinedView(offline.view(), online.view())
    assert both.latest() is both
    online.withdraw(0)
    later = both.latest()
    assert later is not both
    assert later.lengths.tolist() == [10, 6, 5]
    assert later.withdrawn is not None
    assert later.withdrawn.tolist() == [False, False, True]
    assert later.episode_returns.tolist() == [55, 21, 15]


def critic(offline: LiveStore, online: LiveStore, **fields: Any) -> Any:
    sources = transition_buffers(offline.view(), online.view(), config(**fields))
    return Mixture(sources, TransitionBatchBuilder(0.99), batch=256, seed=0)


def test_the_critic_sees_logged_steps_only_until_enough_are_collected() -> None:
    offline, online = live([300]), live([])
    mix = critic(offline, online)
    assert mix.counts(0) == [256, 0]
    online.append(numbered(100, 4999))
    assert mix.latest().counts(0) == [256, 0]
    online.append(numbered(101, 1))
    later = mix.latest()
    assert later.counts(0) == [128, 128]
    assert (later.batch(0).states[:, 0] >= 100).sum() == 128


def test_the_critic_sees_every_kept_step_alike() -> None:
    sources = transition_buffers(
        live([5, 9, 3]).view(),
        live([4, 8, 2]).view(),
        config(offline_transitions=8, online_transitions=10),
        train=np.array([True, False, True]),
    )
    weights = [episode_weights(part.view, part.selector, length=1).tolist() for part in sources]
    assert weights == [[5, 0, 3], [0, 8, 2]]
    assert [part.share for part in sources] == [0.5, 0.5]
