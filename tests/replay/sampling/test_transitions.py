"""Single steps for a critic: what is drawn is what the episodes say."""

from pathlib import Path

import numpy as np
import pytest

from m3pc.core.rng import CRITIC_BATCH, counter_stream
from m3pc.types import InputError
from replay.sampling.transitions import TransitionSampler
from replay.store.store import Store, write_store
from tests.support.episodes.episodes import header, numbered
from tests.support.episodes.live_view import live

LENGTHS = [5, 3, 9, 1, 12]
TERMINATED = [False, True, False, True, True]
HALF = 0.5
SEGMENTS = pytest.mark.parametrize("segment_bytes", [1, 150, 1 << 20])


def make(path: Path, *, segment_bytes: int = 1) -> Store:
    with write_store(path, header(), segment_bytes=segment_bytes) as writer:
        for number, (length, terminated) in enumerate(zip(LENGTHS, TERMINATED, strict=True)):
            writer.append(numbered(number, length, terminated=terminated))
    return Store(path)


def sampler(
    store: Store,
    *,
    batch: int = 200,
    seed: int = 0,
    discount: float = HALF,
    chosen: list[bool] | None = None,
) -> TransitionSampler:
    mask = None if chosen is None else np.array(chosen)
    return TransitionSampler(store, batch=batch, seed=seed, discount=discount, chosen=mask)


def seen(episode: int, step: int, discount: float) -> float:
    """Rewards are 1, 2, ...; where only the clock ended them, they go on as they were."""
    rewards = [k + 1 for k in range(step, LENGTHS[episode])]
    total = sum(reward * discount**k for k, reward in enumerate(rewards))
    cut = not TERMINATED[episode] and discount < 1
    return total / (1 - discount ** len(rewards)) if cut else total


@SEGMENTS
@pytest.mark.parametrize("discount", [HALF, 0.99, 1.0])
def test_every_row_is_a_step_of_an_episode(
    discount: float, segment_bytes: int, tmp_path: Path
) -> None:
    store = make(tmp_path / "s", segment_bytes=segment_bytes)
    drawn = sampler(store, discount=discount).batch(3)
    assert {name: getattr(drawn, name).shape for name in drawn.__slots__} == {
        "states": (200, 2),
        "actions": (200, 1),
        "rewards": (200,),
        "next_states": (200, 2),
        "terminals": (200,),
        "returns": (200,),
    }
    assert {getattr(drawn, name).dtype for name in drawn.__slots__} == {np.dtype(np.float32)}
    episode, step = drawn.states.T
    assert {(e, t) for e, t in drawn.states.tolist()} == {
        (e, t) for e, length in enumerate(LENGTHS) for t in range(length)
    }  # all 30 of them in 200 draws
    assert np.array_equal(drawn.rewards, step + 1)
    assert drawn.actions[:, 0] == pytest.approx(step / 1000)
    # The final state is as good a next state as any: of the same episode, a step later.
    assert np.array_equal(drawn.next_states, np.stack([episode, step + 1], axis=1))
    last = step + 1 == np.array(LENGTHS)[episode.astype(int)]
    ended = np.array(TERMINATED)[episode.astype(int)]
    assert 0 < (last & ~ended).sum() < last.sum()
    assert np.array_equal(drawn.terminals, last & ended)
    expected = [seen(int(e), int(t), discount) for e, t in drawn.states]
    assert drawn.returns.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_end_of_a_task_may_be_treated_as_a_step_limit(tmp_path: Path) -> None:
    """As if the clock had ended it: critic.terminals=false."""
    with write_store(tmp_path / "s", header(), segment_bytes=1) as writer:
        writer.append(numbered(0, 3, terminated=True))
    store = Store(tmp_path / "s")
    drawn = TransitionSampler(store, batch=50, seed=0, discount=HALF, terminals=False).batch(0)
    returns = {int(s[1]): x for s, x in zip(drawn.states, drawn.returns.tolist(), strict=True)}
    assert returns == {0: pytest.approx(2.75 / 0.875), 1: pytest.approx(3.5 / 0.75), 2: 6}


def test_returns_by_hand(tmp_path: Path) -> None:
    """Rewards 1, 2, 3, discount a half: a task's end, and a clock's that 1 - 0.5^n makes up for."""
    with write_store(tmp_path / "s", header(), segment_bytes=1) as writer:
        writer.append(numbered(0, 3, terminated=True))
        writer.append(numbered(1, 3))
    drawn = sampler(Store(tmp_path / "s")).batch(0)
    returns = {
        (int(episode), int(step)): value
        for (episode, step), value in zip(drawn.states, drawn.returns.tolist(), strict=True)
    }
    assert returns == {
        (0, 0): 2.75,
        (0, 1): 3.5,
        (0, 2): 3,
        (1, 0): pytest.approx(2.75 / 0.875),
        (1, 1): pytest.approx(3.5 / 0.75),
        (1, 2): 6,
    }


def test_every_step_comes_equally_often(tmp_path: Path) -> None:
    drawn = sampler(make(tmp_path / "s", segment_bytes=150), batch=20_000).batch(0)
    steps, counts = np.unique(drawn.states, axis=0, return_counts=True)
    assert len(steps) == sum(LENGTHS) == 30
    # Multinomial: 667 expected of each, standard deviation 25; six of them never happen.
    assert np.abs(counts - 20_000 / 30).max() < 6 * 25.4


@SEGMENTS
@pytest.mark.parametrize("chosen", [[2, 4], [0], [3], [0, 1, 2, 3, 4]])
def test_only_chosen_episodes_are_drawn(
    chosen: list[int], segment_bytes: int, tmp_path: Path
) -> None:
    store = make(tmp_path / "s", segment_bytes=segment_bytes)
    restricted = sampler(store, chosen=[number in chosen for number in range(5)])
    assert len(restricted) == sum(LENGTHS[number] for number in chosen)
    drawn = restricted.batch(0)
    assert set(drawn.states[:, 0].tolist()) == set(chosen)
    assert np.array_equal(drawn.next_states[:, 1], drawn.states[:, 1] + 1)
    assert np.array_equal(drawn.next_states[:, 0], drawn.states[:, 0])
    expected = [seen(int(e), int(t), HALF) for e, t in drawn.states]
    assert drawn.returns.tolist() == pytest.approx(expected)


def test_no_chosen_episode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no episode of 1 steps or more"):
        sampler(make(tmp_path / "s"), chosen=[False] * 5)


def test_segments_on_disk_do_not_change_what_is_drawn(tmp_path: Path) -> None:
    one = sampler(make(tmp_path / "one", segment_bytes=1 << 20)).batch(5)
    many = sampler(make(tmp_path / "many", segment_bytes=1)).batch(5)
    assert all(np.array_equal(getattr(one, name), getattr(many, name)) for name in one.__slots__)


def test_seed_and_update_alone_determine_a_batch(tmp_path: Path) -> None:
    store = make(tmp_path / "s", segment_bytes=150)
    forwards = [sampler(store).batch(update) for update in range(4)]
    again = sampler(store)
    for update in reversed(range(4)):
        other = again.batch(update)
        for name in other.__slots__:
            assert np.array_equal(getattr(other, name), getattr(forwards[update], name))
    assert not np.array_equal(forwards[0].states, forwards[1].states)
    assert not np.array_equal(forwards[0].states, sampler(store, seed=1).batch(0).states)


def test_a_batch_is_the_callers_own(tmp_path: Path) -> None:
    """Whatever is done to one, the next is as it would have been, and so is the store."""
    store = make(tmp_path / "s")
    one = sampler(store)
    spoilt = one.batch(0)
    for name in spoilt.__slots__:
        getattr(spoilt, name)[:] = -1
    assert np.array_equal(one.batch(0).returns, sampler(store).batch(0).returns)
    assert (sampler(make(tmp_path / "t")).batch(0).next_states == one.batch(0).next_states).all()


def test_a_withdrawn_episode_is_never_drawn() -> None:
    store = live(LENGTHS, cut=2)
    store.withdraw(2, 4)
    drawn = TransitionSampler(store.view(), batch=500, seed=0, discount=HALF).batch(0)
    assert set(drawn.states[:, 0]) == {0, 1, 3}


def test_one_random_number_names_a_step_in_the_list_of_all(tmp_path: Path) -> None:
    """What a run drew it draws again after any change here, or it would not resume bit for bit."""
    restricted = sampler(make(tmp_path / "s", segment_bytes=150), batch=50, seed=3)
    steps = [(e, t) for e, length in enumerate(LENGTHS) for t in range(length)]
    for update in (0, 7, 10**6):
        numbers = counter_stream(3, update, CRITIC_BATCH).integers(len(steps), size=50)
        drawn = restricted.batch(update).states.astype(int).tolist()
        assert [tuple(step) for step in drawn] == [steps[number] for number in numbers]
