"""Distances to goals by hand, and where states lie among those of a data set."""

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.episodes import rollouts
from m3pc.core.history import HistoryBuffer
from m3pc.envs import make_vector
from m3pc.evaluation.statistics import t_interval
from m3pc.goals.distribution import distribution
from m3pc.goals.tracking import MEASURES, Tracking, tracking, within_tolerance
from m3pc.types import Episode, Floats
from tests.support.envs.countdown import COUNTDOWN
from tests.support.fakes.fake_planner import FakePlanner


def column(*values: float) -> Floats:
    """Values in dimension 1 of states of two dimensions."""
    return np.stack([np.zeros(len(values)), values], axis=1).astype(np.float32)


def tracked(states: Floats, table: Floats, *, steps: int, tolerance: float = 1.0) -> Tracking:
    return tracking(
        states,
        table,
        key=(1,),
        steps=steps,
        tolerance=tolerance,
        std=np.array([1, 2], np.float32),
        success=True,
    )


def test_the_first_state_does_not_count() -> None:
    result = tracked(column(9, 3, -1), column(0, 0, 0, 7), steps=2, tolerance=1)
    assert result.rms == pytest.approx(np.sqrt((9 + 1) / 2))
    assert (result.distance, result.final, result.within) == (2, 1, 0.5)
    assert result.deviation == pytest.approx(np.sqrt((9 / 4 + 1 / 4) / 4))  # over two dimensions
    assert result.success == 1
    assert MEASURES.keys() == set(Tracking.__slots__)


def test_an_episode_that_ended_early_counts_as_staying_in_its_last_state() -> None:
    result = tracked(column(0, 2), column(0, 0, 0, 1), steps=3)
    assert result.distance == pytest.approx((2 + 2 + 1) / 3)
    assert result.final == 1


def test_several_dimensions_are_one_distance() -> None:
    states = np.array([[0, 0], [3, 4]], np.float32)
    assert within_tolerance(states, np.zeros_like(states), key=(0, 1), first=1, tolerance=5)
    assert not within_tolerance(states, np.zeros_like(states), key=(0, 1), first=1, tolerance=4.9)
    assert within_tolerance(states, np.zeros_like(states), key=(1,), first=1, tolerance=4)


def episode(states: NDArray[np.float64]) -> Episode:
    length = len(states) - 1
    return Episode(
        states=states.astype(np.float32),
        actions=np.zeros((length, 1), np.float32),
        rewards=np.zeros(length, np.float32),
        terminated=False,
        truncated=True,
    )


def grid(offset: float) -> Episode:
    """States one apart in dimension 0, whose deviation is ten times that of dimension 1."""
    x = np.arange(-50.0, 51.0) + offset
    return episode(np.stack([x, np.where(np.arange(101) % 2, -3.0, 3.0)], axis=1))


def test_distances_are_relative_to_the_typical_distance_between_episodes() -> None:
    data = distribution([grid(0), grid(0.5)])
    x, y = data.std
    assert (data.mean[0], y) == (pytest.approx(0.25), pytest.approx(3, rel=1e-3))
    # The nearest state of the other episode is half a unit away, or in the other row.
    assert data.typical == pytest.approx(0.5 / x, rel=1e-3)
    assert data.distance(np.array([[0.1, 3]], np.float32)) == pytest.approx(0.2, rel=1e-3)
    beyond = np.array([[0, 3 + 2 * y]], np.float32)
    assert data.distance(beyond) == pytest.approx(2 / (0.5 / x), rel=1e-3)


def test_the_plane_has_the_axes_of_largest_variance() -> None:
    rng = np.random.default_rng(0)
    one = rng.standard_normal(500)
    states = np.stack([one, -one, rng.standard_normal(500), np.ones(500)], axis=1)
    data = distribution([episode(states)])
    assert data.explained == pytest.approx((2 / 3, 1 / 3), abs=0.05)
    assert np.abs(data.axes[0]) == pytest.approx([0.5**0.5, 0.5**0.5, 0, 0], abs=0.05)
    assert data.plane(states.astype(np.float32)) == pytest.approx(data.scatter(), abs=1e-4)
    assert data.typical == 1  # one episode has no other


def test_states_of_one_dimension_have_a_plane_too() -> None:
    data = distribution([episode(np.arange(5.0)[:, None]), episode(np.arange(5.0)[:, None])])
    assert data.explained == (1, 0)
    assert data.scatter()[:, 1].tolist() == [0] * 5 * 2


def test_three_values_have_an_interval_by_students_t() -> None:
    low, high = t_interval(np.array([1.0, 2.0, 3.0]))
    assert [low, high] == pytest.approx([2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5])
    assert np.isnan(t_interval(np.array([1.0]))).all()
    many = np.arange(40.0)
    half = 2.228 * many.std(ddof=1) / 40**0.5
    assert t_interval(many)[1] == pytest.approx(19.5 + half)


# Waypoints by where an episode begins


def test_each_episode_has_the_waypoints_of_its_first_state() -> None:
    def waypoints(first: Floats) -> Floats:
        return np.repeat(first[None] + 100, 10, axis=0)

    past = HistoryBuffer(2, window=4, horizon=2, state_size=1, action_size=1)
    for slot, place in enumerate((1.0, 2.0)):
        past.begin(slot, np.array([place], np.float32), 0, waypoints)
    assert past.window([0, 1]).states[..., 0].tolist() == [[1, 101, 101, 101], [2, 102, 102, 102]]


def test_rollouts_make_waypoints_once_per_episode() -> None:
    planner, first_states = FakePlanner(1), []

    def waypoints(first: Floats) -> Floats:
        first_states.append(first.tolist())
        return np.full((60, 2), 7 + first[0], np.float32)

    starts = [(5, 0), (1, 0), (0, 0)]  # Countdown: the state begins as (seed, 0)
    envs = make_vector(COUNTDOWN, 2)
    played = list(rollouts(envs, planner, starts, waypoints=waypoints))
    envs.close()
    assert first_states == [[5, 0], [1, 0], [0, 0]]
    assert len(played) == 3
    assert planner.asked[0].states[:, 1:, 0].tolist() == [[12] * 7, [8] * 7]
