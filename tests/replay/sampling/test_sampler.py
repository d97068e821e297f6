import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from m3pc.core.returns import ReturnRule, returns_to_go
from m3pc.core.rng import counter_stream
from m3pc.types import InputError
from replay.sampling.sampler import Sampler, WindowBatchBuilder, WindowIndex
from replay.store.store import Store, write_store
from tests.support.episodes.episodes import header, numbered
from tests.support.episodes.live_view import live

LENGTHS = [5, 3, 9, 4, 12]
LENGTH = 4
RULE = ReturnRule(max_episode_steps=1000)


def make(path: Path, *, segment_bytes: int) -> Store:
    with write_store(path, header(), segment_bytes=segment_bytes) as writer:
        for number, length in enumerate(LENGTHS):
            writer.append(numbered(number, length))
    return Store(path)


def sampler(store: Store, *, batch: int = 64, seed: int = 0) -> Sampler:
    return Sampler(store, length=LENGTH, batch=batch, seed=seed, returns=RULE)


@pytest.mark.parametrize("segment_bytes", [1, 150, 1 << 20])
def test_a_window_is_consecutive_steps_of_one_episode(tmp_path: Path, segment_bytes: int) -> None:
    drawn = sampler(make(tmp_path / "s", segment_bytes=segment_bytes)).batch(3)
    episode, step = drawn.states[..., 0], drawn.states[..., 1]
    assert (episode == episode[:, :1]).all()
    assert (np.diff(step, axis=1) == 1).all()
    assert (step[:, 0] == drawn.steps).all()
    assert (drawn.rewards == step + 1).all()
    assert np.allclose(drawn.actions[..., 0], step / 1000)
    for row in range(len(step)):
        length = LENGTHS[int(episode[row, 0])]
        returns = returns_to_go(
            np.arange(1, length + 1, dtype=np.float32), np.array([length]), RULE
        )
        first = int(step[row, 0])
        assert drawn.returns[row].tolist() == returns[first : first + LENGTH].tolist()


def test_every_possible_window_comes_equally_often_and_no_other(tmp_path: Path) -> None:
    drawn = sampler(make(tmp_path / "s", segment_bytes=150), batch=20_000).batch(0)
    windows, counts = np.unique(drawn.states[:, 0].astype(int), axis=0, return_counts=True)
    possible = [
        [episode, first]
        for episode, length in enumerate(LENGTHS)
        for first in range(length - LENGTH + 1)
    ]
    assert windows.tolist() == possible
    # Multinomial: 20,000 / 18 = 1111 expected, standard deviation 32; six of them never happen.
    assert np.abs(counts - 20_000 / len(possible)).max() < 6 * 32


def test_the_number_of_windows_is_known(tmp_path: Path) -> None:
    assert len(sampler(make(tmp_path / "s", segment_bytes=1))) == 2 + 6 + 1 + 9


def test_segments_on_disk_do_not_change_what_is_drawn(tmp_path: Path) -> None:
    one = sampler(make(tmp_path / "one", segment_bytes=1 << 20)).batch(5)
    many = sampler(make(tmp_path / "many", segment_bytes=1)).batch(5)
    assert all(np.array_equal(getattr(one, name), getattr(many, name)) for name in one.__slots__)


def test_seed_and_update_alone_determine_a_batch(tmp_path: Path) -> None:
    store = make(tmp_path / "s", segment_bytes=1 << 20)
    forwards = [sampler(store).batch(update).states for update in range(4)]
    again = sampler(store)
    backwards = [again.batch(update).states for update in reversed(range(4))]
    assert all(map(np.array_equal, forwards, reversed(backwards)))
    assert not np.array_equal(forwards[0], forwards[1])
    assert not np.array_equal(forwards[0], sampler(store, seed=1).batch(0).states)


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [0, 2]])
def test_one_random_number_names_a_window_in_the_list_of_all(
    tmp_path: Path, chosen: list[int]
) -> None:
    """What a run drew it draws again after any change here, or it would not resume bit for bit."""
    store = make(tmp_path / "s", segment_bytes=150)
    mask = np.array([number in chosen for number in range(len(LENGTHS))])
    restricted = Sampler(store, length=LENGTH, batch=50, seed=3, returns=RULE, chosen=mask)
    windows = [(e, t) for e in chosen for t in range(LENGTHS[e] - LENGTH + 1)]
    for update in (0, 7, 10**6):
        numbers = counter_stream(3, update).integers(len(windows), size=50)
        drawn = restricted.batch(update).states[:, 0].astype(int).tolist()
        assert [tuple(window) for window in drawn] == [windows[number] for number in numbers]


@pytest.mark.parametrize("segment_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("chosen", [[0, 1, 4], [0], [4], [2, 3]])
def test_only_chosen_episodes_are_drawn(
    tmp_path: Path, chosen: list[int], segment_bytes: int
) -> None:
    store = make(tmp_path / "s", segment_bytes=segment_bytes)
    mask = np.array([number in chosen for number in range(len(LENGTHS))])
    restricted = Sampler(store, length=LENGTH, batch=500, seed=0, returns=RULE, chosen=mask)
    drawn = restricted.batch(0)
    possible = {
        (episode, first) for episode in chosen for first in range(LENGTHS[episode] - LENGTH + 1)
    }
    assert len(restricted) == len(possible)
    assert set(map(tuple, drawn.states[:, 0].astype(int).tolist())) == possible
    assert (drawn.states[..., 0] == drawn.states[:, :1, 0]).all()
    assert (np.diff(drawn.states[..., 1], axis=1) == 1).all()


def test_chosen_episodes_that_are_all_too_short_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path / "s", segment_bytes=1)
    mask = np.array([False, True, False, False, False])
    with pytest.raises(InputError, match="longest has 3"):
        Sampler(store, length=LENGTH, batch=1, seed=0, returns=RULE, chosen=mask)


def test_episodes_that_are_all_too_short_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path / "s", segment_bytes=1 << 20)
    with pytest.raises(InputError, match="longest has 12"):
        Sampler(store, length=13, batch=1, seed=0, returns=RULE)


class ManySegments:
    """As much of a store as a `WindowIndex` uses: one episode a segment."""

    path = Path("many")

    def __init__(self, count: int) -> None:
        self.lengths = np.full(count, LENGTH)
        lengths = np.array([LENGTH])
        self.segments = [SimpleNamespace(lengths=lengths, number=n) for n in range(count)]


def test_more_segments_than_16_bits_can_number_are_distinguished() -> None:
    count = 70_000
    windows = WindowIndex(cast(Store, ManySegments(count)), LENGTH, np.ones(count, np.int64))
    parts, _ = windows.draw(np.random.default_rng(0), 5_000)
    numbers = np.array([cast(Any, part.segment).number for part in parts])
    assert (np.diff(numbers) > 0).all()
    assert numbers.max() > 2**16


def test_the_replay_package_never_loads_torch() -> None:
    code = (
        "import replay.sampling.buffers, replay.server.rate_limiter, replay.store.statistics, sys; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def weighted(lengths: list[int], weight: list[int], *, cut: int = 2) -> WindowIndex:
    return WindowIndex(live(lengths, cut=cut).view(), LENGTH, np.array(weight))


@pytest.mark.parametrize(
    ("weight", "share"),
    [
        ([2, 6, 1], [2 / 9, 6 / 9, 1 / 9]),  # as many as there are windows
        ([5, 9, 4], [5 / 18, 9 / 18, 4 / 18]),
        ([1, 1, 1], [1 / 3, 1 / 3, 1 / 3]),
        ([0, 1, 7], [0, 1 / 8, 7 / 8]),
        ([1 << 60, 1 << 60, 0], [1 / 2, 1 / 2, 0]),
    ],
)
def test_an_episode_is_drawn_by_its_weight_and_its_start_evenly(
    weight: list[int], share: list[float]
) -> None:
    lengths, count = [5, 9, 4], 20_000
    view = live(lengths, cut=2).view()
    windows = WindowIndex(view, LENGTH, np.array(weight))
    drawn = WindowBatchBuilder(LENGTH, RULE).gather(windows.draw(np.random.default_rng(0), count))
    counts = np.zeros((3, 6))
    np.add.at(counts, (drawn.states[:, 0, 0].astype(int), drawn.steps), 1)
    spans = np.array([2, 6, 1])
    expected = np.where(
        np.arange(6) < spans[:, None], count * np.array(share)[:, None] / spans[:, None], 0
    )
    assert (counts[expected == 0] == 0).all()
    # Binomial: a deviation is at most the root of what is expected; six of them never happen.
    assert (np.abs(counts - expected) <= 6 * np.sqrt(expected)).all()


def test_the_returns_of_a_segment_are_computed_once_and_read_only() -> None:
    (segment,) = live([3], cut=1).view().segments
    rule = ReturnRule(max_episode_steps=3, average=False)
    returns = segment.returns(rule)
    assert returns.tolist() == [6, 5, 3]
    assert segment.returns(ReturnRule(max_episode_steps=3, average=False)) is returns
    assert segment.returns(RULE) is not returns
    with pytest.raises(ValueError, match="read-only"):
        returns[0] = 0


def test_an_episode_without_weight_does_not_count_among_the_windows() -> None:
    assert weighted([5, 9, 4], [3, 0, 8]).count == 2 + 1
    assert weighted([5, 9, 4], [0, 0, 0]).weight == 0


def test_an_episode_too_short_for_a_window_is_not_drawn_whatever_its_weight() -> None:
    windows = weighted([5, 3, 4], [1, 100, 1])
    assert (windows.count, windows.weight) == (3, 2)


def test_a_store_without_an_episode_has_no_window() -> None:
    empty = live([]).view()
    assert WindowIndex(empty, LENGTH, np.zeros(0, np.int64)).weight == 0
    with pytest.raises(InputError, match="longest has 0"):
        Sampler(empty, length=LENGTH, batch=1, seed=0, returns=RULE)


@pytest.mark.parametrize("cut", [1, 5])
def test_a_withdrawn_episode_is_never_drawn_chosen_or_not(cut: int) -> None:
    store = live(LENGTHS, cut=cut)
    store.withdraw(2, 4)
    for chosen in (None, np.ones(len(LENGTHS), np.bool_)):
        restricted = Sampler(
            store.view(), length=LENGTH, batch=500, seed=0, returns=RULE, chosen=chosen
        )
        assert set(restricted.batch(0).states[..., 0].flat) == {0, 3}


def test_a_store_of_which_all_was_withdrawn_is_refused() -> None:
    store = live(LENGTHS)
    store.withdraw(*range(len(LENGTHS)))
    with pytest.raises(InputError, match="longest has 0"):
        Sampler(store.view(), length=LENGTH, batch=1, seed=0, returns=RULE)
