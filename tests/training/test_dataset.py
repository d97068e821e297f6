"""Which episodes pretraining takes, their statistics, and the return that it will ask for.

E episodes, L steps of one, H the step limit, S state.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from m3pc.config.schema import Config
from m3pc.training.dataset import Dataset, prepare_dataset, split
from m3pc.types import Episode, InputError
from replay.format.manifest import Header
from replay.store.store import Store, write_store
from tests.support.episodes.episodes import header, numbered
from tests.support.models.small_weights import tiny_config
from tests.support.runs.refusals import sentence

Doubles = NDArray[np.float64]
HORIZON = 9
SEGMENTS = pytest.mark.parametrize("segment_bytes", [1, 200, 1 << 20])  # one an episode, some, one


def config(**changes: object) -> Config:
    """Windows of 2 steps, so that episodes are short; all are learned from, in order."""
    plain: dict[str, Any] = {
        "model__window": 2,
        "planner__horizon": 1,
        "dataset__min_length": 2,
        "dataset__train_share": 1.0,
        "dataset__shuffle": False,
    }
    return tiny_config(**plain | changes)


def write(path: Path, episodes: Sequence[Episode], horizon: int, segment_bytes: int = 1) -> Store:
    states, actions = episodes[0].states.shape[1], episodes[0].actions.shape[1]
    fits = header(states=states, actions=actions, max_episode_steps=horizon)
    with write_store(path, fits, segment_bytes=segment_bytes) as writer:
        for episode in episodes:
            writer.append(episode)
    store = Store(path)
    assert segment_bytes > 1 or len(store.segments) == len(episodes)
    return store


def with_rewards(*rewards: float) -> Episode:
    """States count the steps; everything else is 0."""
    count = len(rewards)
    return Episode(
        states=np.arange(count + 1, dtype=np.float32)[:, None],
        actions=np.zeros((count, 1), np.float32),
        rewards=np.asarray(rewards, np.float32),
        terminated=False,
        truncated=True,
    )


# Split


def of_lengths(path: Path, lengths: Sequence[int]) -> Store:
    return write(path, [numbered(number, n) for number, n in enumerate(lengths)], horizon=20)


@pytest.mark.parametrize(
    ("share", "train", "held_out"), [(1.0, 10, 0), (0.95, 10, 0), (0.8, 8, 2), (0.06, 1, 9)]
)
def test_the_first_episodes_are_learned_from_and_the_last_ones_held_out(
    share: float, train: int, held_out: int, tmp_path: Path
) -> None:
    store = of_lengths(tmp_path / "s", [5] * 10)
    learned, measured = split(store, config(dataset__train_share=share))
    assert learned.tolist() == [True] * train + [False] * held_out
    assert measured.tolist() == [False] * train + [True] * held_out


def test_episodes_that_are_too_short_are_in_neither_part(tmp_path: Path) -> None:
    store = of_lengths(tmp_path / "s", [3, 4, 5, 2, 9, 4, 1, 4])
    learned, measured = split(
        store, config(dataset__min_length=4, dataset__train_share=0.6, dataset__shuffle=False)
    )
    assert np.flatnonzero(learned).tolist() == [1, 2, 4]  # of 1, 2, 4, 5, 7
    assert np.flatnonzero(measured).tolist() == [5, 7]
    learned, measured = split(
        store, config(dataset__min_length=4, dataset__train_share=0.6, dataset__shuffle=True)
    )
    assert (learned.sum(), measured.sum()) == (3, 2)
    assert np.flatnonzero(learned | measured).tolist() == [1, 2, 4, 5, 7]


def test_the_seed_alone_shuffles(tmp_path: Path) -> None:
    store = of_lengths(tmp_path / "s", [4] * 40)
    halves = [
        split(store, config(dataset__train_share=0.5, dataset__shuffle=True, seed=seed))
        for seed in (0, 0, 1, 2)
    ]
    for learned, measured in halves:
        assert learned.sum() == measured.sum() == 20
        assert not (learned & measured).any()
    drawn = [np.flatnonzero(learned).tolist() for learned, _ in halves]
    assert drawn[0] == drawn[1]
    assert len({tuple(part) for part in drawn}) == 3
    assert list(range(20)) not in drawn


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset__min_length": 6}, "has 0 episodes of 6 steps or more"),
        ({"dataset__train_share": 0.1}, "has 3 episodes of 2 steps or more"),
    ],
)
def test_no_episode_to_learn_from_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    store = of_lengths(tmp_path / "s", [5, 5, 5])
    with pytest.raises(InputError) as refused:
        prepare_dataset(store, config(**changes))
    assert words in sentence(refused)


# Statistics


def random_episodes(lengths: Sequence[int]) -> list[Episode]:
    """Far from 0, so that padding changes mean and deviation."""
    rng = np.random.default_rng(3)
    return [
        Episode(
            states=rng.normal([5.0, -3.0, 0.5], [2.0, 0.7, 4.0], (n + 1, 3)).astype(np.float32),
            actions=rng.uniform(-1, 1, (n, 2)).astype(np.float32),
            rewards=rng.normal(4, 2, n).astype(np.float32),
            terminated=bool(n % 2),
            truncated=not n % 2,
        )
        for n in lengths
    ]


def filled(columns: Sequence[NDArray[Any]]) -> Doubles:
    """Episodes [L, ...] as one array [E, H, ...] with zeros after their ends."""
    cells = np.zeros((len(columns), HORIZON, *columns[0].shape[1:]))
    for row, column in zip(cells, columns, strict=True):
        row[: len(column)] = column
    return cells


def naive_returns(rewards: NDArray[Any], include_now: bool) -> Doubles:
    """The average over the H - t remaining steps, by its definition."""
    first = 0 if include_now else 1
    sums = [rewards[t + first :].sum(dtype=np.float64) for t in range(len(rewards))]
    return np.array([total / (HORIZON - t) for t, total in enumerate(sums)])


def naive(episodes: Sequence[Episode], *, padded: bool, include_now: bool) -> dict[str, Doubles]:
    columns: dict[str, list[NDArray[Any]]] = {
        "states": [e.states[:-1] for e in episodes],
        "rewards": [e.rewards[:, None] for e in episodes],
        "returns": [naive_returns(e.rewards, include_now)[:, None] for e in episodes],
    }
    statistics: dict[str, Doubles] = {}
    for name, parts in columns.items():
        column = filled(parts) if padded else np.concatenate(parts).astype(np.float64)
        rows = column.reshape(-1, column.shape[-1])
        statistics |= {f"{name}.mean": rows.mean(axis=0), f"{name}.std": rows.std(axis=0)}
    return statistics


@SEGMENTS
@pytest.mark.parametrize("include_now", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_statistics_are_those_of_the_plain_arrays(
    padded: bool, include_now: bool, segment_bytes: int, tmp_path: Path
) -> None:
    """The first four of six long enough episodes are learned from; padding is zeros up to H."""
    episodes = random_episodes([6, 4, 2, 9, 5, 7, 8])
    store = write(tmp_path / "s", episodes, HORIZON, segment_bytes)
    changes = {"normaliser__padded": padded, "returns__include_now": include_now}
    dataset = prepare_dataset(
        store, config(dataset__min_length=4, dataset__train_share=0.67, **changes)
    )
    assert np.flatnonzero(dataset.train).tolist() == [0, 1, 3, 4]
    learned = [episodes[number] for number in (0, 1, 3, 4)]
    expected = naive(learned, padded=padded, include_now=include_now)
    assert dataset.arrays.keys() == expected.keys()
    for name, values in expected.items():
        array = dataset.arrays[name]
        assert array.dtype == np.float32
        assert array == pytest.approx(values, rel=1e-5), name
    bare = naive(learned, padded=False, include_now=include_now)
    assert dataset.critic_arrays["state_mean"] == pytest.approx(bare["states.mean"], rel=1e-5)
    assert dataset.critic_arrays["state_std"] == pytest.approx(bare["states.std"], rel=1e-5)


def spreads(path: Path, **changes: object) -> Dataset:
    """Deviations of states: 0, exactly 1/4, 2; of rewards: 0."""
    steps = np.array([[7, 0.5, 0], [7, 0, 4], [7, 0.5, 0], [7, 0, 4], [7, 0, 0]], np.float32)
    episode = Episode(
        states=steps,
        actions=np.zeros((4, 1), np.float32),
        rewards=np.full(4, 3, np.float32),
        terminated=True,
        truncated=False,
    )
    return prepare_dataset(write(path, [episode] * 2, horizon=4), config(**changes))


@pytest.mark.parametrize(
    ("floor", "below", "states", "rewards"),
    [
        (1e-3, "floor", [1e-3, 0.25, 2], 1e-3),
        (0.25, "floor", [0.25, 0.25, 2], 0.25),  # at the floor is not below it
        (0.25, "one", [1, 0.25, 2], 1),
        (0.5, "floor", [0.5, 0.5, 2], 0.5),
        (0.5, "one", [1, 1, 2], 1),
    ],
)
def test_a_nearly_constant_column_is_not_scaled_up(
    floor: float, below: str, states: list[float], rewards: float, tmp_path: Path
) -> None:
    changes = {"normaliser__std_floor": floor, "normaliser__below_floor": below}
    dataset = spreads(tmp_path / "s", **changes)
    assert dataset.arrays["states.std"].tolist() == pytest.approx(states)
    assert dataset.arrays["rewards.std"].tolist() == pytest.approx([rewards])
    assert dataset.critic_arrays["state_std"].tolist() == [1, 0.25, 2]  # no floor: 1 for 0 only


# What to ask for

# fmt: off
BY_HAND = (  #                      returns        sum
    (1.0, 1.0, 1.0, 1.0),         #  4  3 2 1       4
    (0.0, 6.0),                   #  6  6           6
    (-1.0, 3.0, 5.0),             #  7  8 5         7
    (-20.0, 12.0, 1.0, 1.0, 1.0), # -5 15 3 2 1    -5
    (100.0, 100.0),               # held out
)
# fmt: on
SUMS: dict[str, object] = {"returns__mode": "sum", "dataset__train_share": 0.8}
FEW_BYTES = pytest.mark.parametrize("segment_bytes", [1, 60, 1 << 20])


def by_hand(path: Path, *, segment_bytes: int = 1, **changes: object) -> Dataset:
    episodes = [with_rewards(*rewards) for rewards in BY_HAND]
    store = write(path, episodes, horizon=7, segment_bytes=segment_bytes)
    return prepare_dataset(store, config(**SUMS | changes))


@FEW_BYTES
@pytest.mark.parametrize(
    ("best", "envelope"),
    [
        (1, [7, 8, 5, 5, 5, 5, 5]),
        (2, [7, 8, 5, 5, 5, 5, 5]),
        (3, [7, 8, 5, 1, 1, 1, 1]),
        (4, [7, 15, 5, 2, 1, 1, 1]),
        (1000, [7, 15, 5, 2, 1, 1, 1]),
    ],
)
def test_the_envelope_is_the_best_return_at_each_step_of_the_best_episodes(
    best: int, envelope: list[float], segment_bytes: int, tmp_path: Path
) -> None:
    dataset = by_hand(tmp_path / "s", segment_bytes=segment_bytes, replay__episodes=best)
    assert dataset.envelope.dtype == np.float32
    assert dataset.envelope.tolist() == envelope


def test_the_envelope_follows_the_rule_of_returns(tmp_path: Path) -> None:
    averages = by_hand(tmp_path / "a", returns__mode="average", replay__episodes=2)
    assert averages.envelope.tolist() == pytest.approx([7 / 7, 8 / 6, 5 / 5, 1, 1, 1, 1])
    later = by_hand(tmp_path / "b", returns__include_now=False, replay__episodes=3)
    assert later.envelope.tolist() == [8, 5, 1, 0, 0, 0, 0]
    half = by_hand(tmp_path / "c", returns__discount=0.5, replay__episodes=1)
    assert half.envelope.tolist() == [1.75, 5.5, 5, 5, 5, 5, 5]


def test_the_rule_of_returns_comes_from_the_settings_and_the_step_limit(tmp_path: Path) -> None:
    rule = by_hand(tmp_path / "s", returns__discount=0.5, returns__include_now=False).rule
    assert (rule.max_episode_steps, rule.average, rule.include_now, rule.discount) == (
        7,
        False,
        False,
        0.5,
    )
    assert by_hand(tmp_path / "t", returns__mode="average").rule.average


@FEW_BYTES
@pytest.mark.parametrize(
    ("rewards", "bare", "padded"),
    [
        (BY_HAND[:4], [-5, 15], [-5, 15]),
        (BY_HAND[:3], [1, 8], [0, 8]),
        (((-1.0, -2.0), (-4.0, -1.0)), [-5, -1], [-5, 0]),
        (((1.0,) * 7, (2.0,) * 7), [1, 14], [1, 14]),  # nothing to fill
    ],
)
def test_the_range_of_returns_has_0_in_it_where_padding_counts(
    rewards: tuple[tuple[float, ...], ...],
    bare: list[float],
    padded: list[float],
    segment_bytes: int,
    tmp_path: Path,
) -> None:
    episodes = [with_rewards(*row) for row in rewards]
    store = write(tmp_path / "s", episodes, horizon=7, segment_bytes=segment_bytes)
    for flag, expected in ((False, bare), (True, padded)):
        # The range is over all that is learned from, not over the best.
        changes = {"normaliser__padded": flag, "replay__episodes": 1}
        return_range = prepare_dataset(store, config(returns__mode="sum", **changes)).return_range
        assert return_range.dtype == np.float32
        assert return_range.tolist() == expected


def test_held_out_episodes_do_not_influence_the_statistics(tmp_path: Path) -> None:
    """The fifth episode is held out: whatever it contains, all numbers are the same."""
    with_it = by_hand(tmp_path / "s")
    episodes = [with_rewards(*rewards) for rewards in BY_HAND[:4]]
    store = write(tmp_path / "t", episodes, horizon=7)
    without = prepare_dataset(store, config(returns__mode="sum"))
    assert with_it.held_out.tolist() == [False] * 4 + [True]
    for name, values in without.arrays.items():
        assert with_it.arrays[name].tolist() == values.tolist()
    assert with_it.return_range.tolist() == without.return_range.tolist() == [-5, 15]
    assert with_it.critic_arrays["state_mean"].tolist() == pytest.approx(
        [20 / 14]
    )  # 6 + 1 + 3 + 10


def test_the_step_limit_comes_from_the_header_alone(tmp_path: Path) -> None:
    fits = Header(states=1, actions=1, max_episode_steps=1000, env=None, source={"kind": "test"})
    with write_store(tmp_path / "s", fits) as writer:
        writer.append(with_rewards(1, 1))
    assert len(prepare_dataset(Store(tmp_path / "s"), config()).envelope) == 1000
