"""Episodes put together from their steps."""

import math

import numpy as np
import pytest

from m3pc.core.episode_recorder import EpisodeRecorder
from m3pc.types import Decision, Floats


def row(*numbers: float) -> Floats:
    return np.array(numbers, np.float32)


def decision(version: int, utilities: list[float]) -> Decision:
    """For as many environments as there are utilities; each target is ten times the utility."""
    values = row(*utilities)
    return Decision(
        actions=np.zeros((len(values), 1), np.float32),
        target_returns=10 * values,
        utilities=values,
        effective_candidates=values + 1,
        utility_std=values + 2,
        version=version,
    )


@pytest.fixture
def recorder() -> EpisodeRecorder:
    """Two steps of an episode in the second of two environments."""
    recorder = EpisodeRecorder(row(0, 0), seed=7)
    recorder.add(row(0.1), 1.0, row(1, 1), decision(3, [0, 2]), row=1)
    recorder.add(row(0.2), 2.0, row(2, 2), decision(5, [0, 4]), row=1)
    return recorder


def test_an_episode_has_every_step_and_its_own_row_of_the_decisions(
    recorder: EpisodeRecorder,
) -> None:
    episode = recorder.episode(terminated=True, truncated=False)
    assert episode.states.tolist() == [[0, 0], [1, 1], [2, 2]]
    np.testing.assert_array_equal(episode.actions, [row(0.1), row(0.2)])
    assert episode.rewards.tolist() == [1, 2]
    assert {array.dtype for array in (episode.states, episode.actions, episode.rewards)} == {
        np.dtype(np.float32)
    }
    assert (episode.terminated, episode.truncated, episode.seed) == (True, False, 7)
    assert (episode.version, episode.last_version) == (3, 5)
    assert (episode.target_return, episode.utility) == (20, 3)
    trace = recorder.trace()
    assert trace.target_returns.tolist() == [20, 40]
    assert trace.utilities.tolist() == [2, 4]
    assert trace.effective_candidates.tolist() == [3, 5]
    assert trace.utility_std.tolist() == [4, 6]


def test_steps_without_a_decision_have_no_version_and_no_utility() -> None:
    recorder = EpisodeRecorder(row(0), seed=1)
    recorder.add(row(0), 1.0, row(1))
    episode = recorder.episode(terminated=False, truncated=True)
    assert (episode.version, episode.last_version) == (-1, -1)
    assert math.isnan(episode.target_return) and math.isnan(episode.utility)


def test_the_utility_is_the_mean_over_the_steps_that_planned() -> None:
    recorder = EpisodeRecorder(row(0), seed=1)
    for utility in (1.0, math.nan, 3.0):
        recorder.add(row(0), 0.0, row(1), decision(0, [utility]))
    assert recorder.episode(terminated=False, truncated=False).utility == 2


def test_amending_replaces_the_last_step_and_keeps_its_decision(
    recorder: EpisodeRecorder,
) -> None:
    recorder.amend(row(9, 9), row(0.9), 5.0)
    episode = recorder.episode(terminated=False, truncated=False)
    assert len(recorder) == 2
    assert episode.states.tolist() == [[0, 0], [1, 1], [9, 9]]
    assert episode.rewards.tolist() == [1, 5]
    assert episode.actions[1, 0] == np.float32(0.9)
    assert (episode.last_version, episode.utility) == (5, 3)


def test_amending_before_the_first_step_replaces_the_first_state() -> None:
    recorder = EpisodeRecorder(row(0), seed=1)
    recorder.amend(row(4), None, None)
    recorder.add(row(0), 1.0, row(1))
    assert recorder.episode(terminated=False, truncated=False).states.tolist() == [[4], [1]]


def test_a_copy_goes_on_alone(recorder: EpisodeRecorder) -> None:
    other = recorder.copy()
    other.amend(row(9, 9), row(0.9), 5.0)
    other.add(row(0.3), 3.0, row(3, 3), decision(6, [6]))
    assert (len(other), len(recorder)) == (3, 2)
    assert recorder.episode(terminated=False, truncated=False).rewards.tolist() == [1, 2]
    assert other.episode(terminated=False, truncated=False).rewards.tolist() == [1, 5, 3]
    assert other.trace().utilities.tolist() == [2, 4, 6]
