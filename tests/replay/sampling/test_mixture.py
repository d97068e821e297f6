"""Several sources in one batch: how many of each, where, and what happens when one is empty."""

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from m3pc.core.returns import ReturnRule
from m3pc.core.rng import CRITIC_BATCH
from m3pc.types import Episode, InputError, TransitionBatch, WindowBatch
from replay.format.segment import Segment
from replay.sampling.mixture import Mixture, MixtureSource, split_batch
from replay.sampling.sampler import Sampler, WindowBatchBuilder
from replay.sampling.selectors import Selector, by_length, by_windows, uniform
from replay.sampling.transitions import TransitionBatchBuilder, TransitionSampler
from replay.store.view import StoreView
from tests.support.episodes.episodes import numbered
from tests.support.episodes.live_view import LiveStore, live

T = 4
RULE = ReturnRule(max_episode_steps=1000)
Windows = Mixture[WindowBatch[NDArray[Any]]]
Steps = Mixture[TransitionBatch[NDArray[Any]]]


def source(
    view: StoreView, share: float = 1.0, *, selector: Selector = uniform, min_steps: int = 0
) -> MixtureSource[Any]:
    return MixtureSource(
        name="some", view=view, selector=selector, share=share, min_steps=min_steps
    )


def windows(*sources: MixtureSource[Any], batch: int = 10, seed: int = 0) -> Windows:
    return Mixture(sources, WindowBatchBuilder(T, RULE), batch=batch, seed=seed)


def steps(*sources: MixtureSource[Any], batch: int = 10) -> Steps:
    return Mixture(sources, TransitionBatchBuilder(0.5), batch=batch, seed=0, purpose=CRITIC_BATCH)


def more(*lengths: int) -> list[Episode]:
    return [numbered(150 + number, length) for number, length in enumerate(lengths)]


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in one.__slots__)


def of_source(batch: Any) -> list[int]:
    """Episodes of the second source are numbered from 100 on, those of the third from 200 on."""
    episodes = batch.states[..., 0].reshape(len(batch.states), -1)[:, 0]
    counts = Counter((episodes // 100).astype(int).tolist())
    return [counts[number] for number in range(3)]


# How a batch is divided.


@pytest.mark.parametrize(
    ("batch", "shares", "counts"),
    [
        (256, [0.5, 0.5], [128, 128]),
        (10, [0.1, 0.2, 0.7], [1, 2, 7]),
        (10, [1, 2, 7], [1, 2, 7]),
        (7, [0.0, 1.0], [0, 7]),
        (7, [1.0, 0.0], [7, 0]),
        (1000, [0.1] * 10, [100] * 10),
    ],
)
def test_shares_that_are_integers_are_never_rounded(
    batch: int, shares: list[float], counts: list[int]
) -> None:
    assert all(split_batch(batch, shares, update) == counts for update in range(2000))


SHARES = pytest.mark.parametrize("shares", [[1 / 3, 2 / 3], [0.01, 0.02, 0.97], [0.3, 0.3, 0.4]])


@SHARES
@pytest.mark.parametrize("batch", [1, 7, 256])
def test_every_part_of_a_batch_is_its_share_rounded_down_or_up(
    batch: int, shares: list[float]
) -> None:
    for update in [*range(2000), 10**9, 10**15]:
        counts = split_batch(batch, shares, update)
        assert sum(counts) == batch
        exact = batch * np.array(shares)
        assert (np.floor(exact - 1e-9) <= counts).all() and (counts <= np.ceil(exact + 1e-9)).all()


@SHARES
@pytest.mark.parametrize("first", [0, 123_456])
def test_over_many_updates_the_mean_is_the_share(shares: list[float], first: int) -> None:
    """An even sequence misses by a few windows in all, not by the square root of the updates."""
    total = np.sum([split_batch(7, shares, first + update) for update in range(10_000)], axis=0)
    assert np.abs(total - 7 * 10_000 * np.array(shares)).max() < 10


# What is in a batch.


def three() -> list[LiveStore]:
    return [live([5, 9, 6], cut=2), live([8, 4], first=100), live([7] * 5, cut=3, first=200)]


@pytest.mark.parametrize("kind", [windows, steps])
def test_a_batch_holds_the_share_of_each_source(kind: Any) -> None:
    parts = zip(three(), (0.5, 0.2, 0.3), strict=True)
    mix = kind(*(source(store.view(), share) for store, share in parts), batch=100)
    for update in range(5):
        assert mix.counts(update) == of_source(mix.batch(update)) == [50, 20, 30]


def test_any_part_of_a_batch_is_a_mix() -> None:
    """Mask groups are equal parts of a batch: none may see one source only."""
    one, other, _ = three()
    mix = windows(source(one.view(), 0.5), source(other.view(), 0.5), batch=64)
    firsts = [mix.batch(update).states[:16, 0, 0] >= 100 for update in range(50)]
    assert all(0 < part.sum() < 16 for part in firsts)
    # Hypergeometric: 8 of 16 expected, variance 3.05; the mean of 50 has a deviation of 0.25.
    assert abs(np.mean([part.sum() for part in firsts]) - 8) < 6 * 0.25


def test_windows_of_a_mixture_are_consecutive_steps_of_one_episode() -> None:
    parts = zip(three(), (0.5, 0.2, 0.3), strict=True)
    mix = windows(*(source(store.view(), share, selector=by_length) for store, share in parts))
    for update in range(20):
        drawn = mix.batch(update)
        episode, step = drawn.states[..., 0], drawn.states[..., 1]
        assert (episode == episode[:, :1]).all() and (np.diff(step, axis=1) == 1).all()
        assert (step[:, 0] == drawn.steps).all() and (drawn.rewards == step + 1).all()
        assert np.allclose(drawn.actions[..., 0], step / 1000)


def test_steps_of_a_mixture_are_steps_of_episodes() -> None:
    parts = zip(three(), (0.5, 0.2, 0.3), strict=True)
    drawn = steps(*(source(store.view(), share) for store, share in parts), batch=500).batch(1)
    assert np.array_equal(drawn.next_states - drawn.states, [[0, 1]] * 500)
    assert np.array_equal(drawn.rewards, drawn.states[:, 1] + 1)


def test_one_source_of_all_windows_draws_what_the_sampler_draws() -> None:
    view = live([5, 9, 3, 6], cut=2).view()
    mix = windows(source(view, selector=by_windows(T)), batch=50, seed=3)
    plain = Sampler(view, length=T, batch=50, seed=3, returns=RULE)
    assert all(equal(mix.batch(update), plain.batch(update)) for update in range(5))


def test_one_source_of_all_steps_draws_what_the_transition_sampler_draws() -> None:
    view = live([5, 9, 3, 6], cut=2).view()
    mix = steps(source(view, selector=by_length), batch=50)
    plain = TransitionSampler(view, batch=50, seed=0, discount=0.5)
    assert all(equal(mix.batch(update), plain.batch(update)) for update in range(5))


# A source that has nothing, or too little.


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_an_empty_source_leaves_its_share_to_the_others(share: float) -> None:
    one, other, _ = three()
    empty = source(live([]).view(), share)
    alone = windows(source(one.view(), 0.0), empty)
    assert alone.counts(0) == of_source(alone.batch(0))[:2] == [10, 0]
    both = windows(source(one.view(), 0.1), source(other.view(), 0.4), empty)
    assert both.counts(0) == of_source(both.batch(0)) == [2, 8, 0]


def test_a_source_without_an_episode_long_enough_is_empty() -> None:
    one = three()[0]
    mix = windows(source(one.view(), 0.5), source(live([T - 1] * 9, first=100).view(), 0.5))
    assert mix.counts(0) == [10, 0]


def test_a_source_of_which_all_was_withdrawn_is_empty() -> None:
    one, other, _ = three()
    other.withdraw(0, 1)
    assert windows(source(one.view(), 0.5), source(other.view(), 0.5)).counts(0) == [10, 0]


def test_a_source_is_drawn_from_once_it_has_enough_steps() -> None:
    one, online = live([50]), live([8, 4], first=100)
    online.withdraw(1)
    mix = steps(source(one.view(), 0.5), source(online.view(), 0.5, min_steps=15))
    assert mix.counts(0) == [10, 0]
    online.append(*more(6))
    assert mix.latest().counts(0) == [10, 0]  # 8 + 6, and 4 that were withdrawn
    online.append(*more(1))
    assert mix.latest().counts(0) == [5, 5]


def test_sources_without_data_are_an_error_that_names_them() -> None:
    mix = windows(source(live([]).view(), 0.5), source(live([T - 1]).view(), 0.5))
    with pytest.raises(InputError, match=r"steps of some in live: 0, some in live: 3.*collect"):
        mix.batch(0)


def test_an_empty_store_that_fills_is_drawn_from() -> None:
    store = live([])
    mix = windows(source(store.view()))
    store.append(*more(6))
    assert (mix.latest().batch(0).states[..., 0] == 150).all()


@pytest.mark.parametrize("selector", [uniform, by_length, by_windows(T)])
@pytest.mark.parametrize("kind", [windows, steps])
def test_a_withdrawn_episode_is_never_drawn(kind: Any, selector: Selector) -> None:
    store = live([5, 9, 6], cut=2)
    mix = kind(source(store.view(), selector=selector), batch=300)
    assert set(np.unique(mix.batch(0).states[..., 0])) == {0, 1, 2}
    store.withdraw(1)
    assert set(np.unique(mix.latest().batch(0).states[..., 0])) == {0, 2}


# What determines a batch.


@pytest.mark.parametrize("kind", [windows, steps])
def test_how_episodes_lie_in_segments_does_not_change_what_is_drawn(kind: Any) -> None:
    draws = []
    for cut in (1, 2, 5):
        views = live([5, 9, 6, 4, 8], cut=cut).view(), live([7] * 5, cut=cut, first=100).view()
        mix = kind(*(source(view, 0.5, selector=by_length) for view in views), batch=40)
        draws.append([mix.batch(update) for update in range(3)])
    for others in draws[1:]:
        assert all(map(equal, draws[0], others))


@pytest.mark.parametrize("kind", [windows, steps])
def test_the_views_seed_and_update_alone_determine_a_batch(kind: Any) -> None:
    sources = [source(store.view(), 0.5) for store in three()[:2]]
    forwards = [kind(*sources).batch(update) for update in range(4)]
    again = kind(*sources)
    backwards = [again.batch(update) for update in reversed(range(4))]
    assert all(map(equal, forwards, reversed(backwards)))
    assert not equal(forwards[0], forwards[1])


@pytest.mark.parametrize("kind", [windows, steps])
def test_sealing_the_newest_episodes_does_not_change_what_is_drawn(kind: Any) -> None:
    store = live([5, 9, 6, 4])
    before = kind(source(store.view(), selector=by_length), batch=40)
    store.seal(1)
    after = before.latest()
    assert equal(before.batch(3), after.batch(3))


@pytest.mark.parametrize("kind", [windows, steps])
def test_new_and_dropped_episodes_show_in_the_latest_mixture_only(kind: Any) -> None:
    store = live([5, 9, 6])
    before = kind(source(store.view()), batch=300)
    old = before.batch(0)
    store.drop()
    store.append(*more(8))
    after = before.latest()
    assert set(np.unique(after.batch(0).states[..., 0])) == {1, 2, 150}
    assert equal(before.batch(0), old)
    fresh = kind(source(store.view()), batch=300)
    assert equal(after.batch(0), fresh.batch(0))


# What a refresh costs.


@pytest.mark.parametrize("builder", [WindowBatchBuilder(T, RULE), TransitionBatchBuilder(0.5)])
def test_only_new_segments_are_prepared_and_dropped_ones_are_freed(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    cached = Segment.cached

    def counted(self: Segment, key: Any, derive: Any) -> Any:
        def recorded(segment: Segment) -> Any:
            if key == builder:
                prepared.append(int(segment.states[0, 0]))
            return derive(segment)

        return cached(self, key, recorded)

    monkeypatch.setattr(Segment, "cached", counted)
    store = live([5, 9, 6])
    mix: Any = Mixture([source(store.view()), source(store.view())], builder, batch=99, seed=0)
    for update in range(2):
        mix.batch(update)
    assert sorted(prepared) == [0, 1, 2]  # once, for two sources and any number of batches
    dropped = weakref.ref(store.view().segments[0].states)
    kept = weakref.ref(store.view().segments[1].states)
    store.drop()
    store.append(*more(8))
    mix = mix.latest()
    mix.batch(0)
    assert sorted(prepared) == [0, 1, 2, 150]
    assert dropped() is None
    assert kept() is not None
