"""Many environments, one planner: each episode the same whatever plays beside it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice
from typing import Any

import numpy as np
import pytest

from actors import single_env
from actors.episodes import rollouts
from actors.vector_rollout import Rollout
from m3pc.core.seeding import EpisodeStart, data_episode, evaluation_episode
from m3pc.envs import make, make_vector
from m3pc.types import Floats, InputError
from tests.support.envs.countdown import COUNTDOWN
from tests.support.episodes.shared_data import ROOT
from tests.support.fakes.fake_planner import FakePlanner


def play(
    env_id: str,
    starts: list[EpisodeStart],
    *,
    slots: int,
    planner: FakePlanner,
    processes: bool = False,
    **options: Any,
) -> list[Rollout]:
    with closing(make_vector(env_id, slots, processes=processes)) as envs:
        return list(rollouts(envs, planner, starts, **options))


def test_the_order_of_the_ends_decides_the_order_of_the_episodes() -> None:
    starts = [(5, 0), (0, 0), (1, 0)]  # 7, 2 and 3 steps
    played = play(COUNTDOWN, starts, slots=2, planner=FakePlanner(1))
    assert [(rollout.number, len(rollout.episode)) for rollout in played] == [
        (1, 2),
        (2, 3),
        (0, 7),
    ]


def test_an_episode_holds_what_happened() -> None:
    planner = FakePlanner(1)
    (rollout,) = play(COUNTDOWN, [(1, 98)], slots=1, planner=planner)
    episode = rollout.episode
    assert episode.states.tolist() == [[1, 0], [1, 1], [1, 2], [1, 3]]
    assert episode.actions.tolist() == [planner.act(episode.states[0], 98, t) for t in range(3)]
    assert episode.rewards.tolist() == [1, 2, 3]
    assert (episode.terminated, episode.truncated) == (True, False)
    assert (episode.seed, episode.version) == (1, 3)
    parts = (episode.states, episode.actions, episode.rewards)
    assert {part.dtype for part in parts} == {np.dtype(np.float32)}
    assert rollout.planning.target_returns.tolist() == [100, 99, 98]
    assert rollout.planning.utilities.tolist() == [1, 1, 1]
    assert rollout.planning.effective_candidates.tolist() == [2, 2, 2]
    assert np.isnan(rollout.planning.utility_std).tolist() == [True] * 3


def test_the_planner_is_asked_once_a_step_about_running_slots_only() -> None:
    planner = FakePlanner(1)
    play(COUNTDOWN, [(0, 10), (1, 11), (3, 12)], slots=2, planner=planner)  # 2, 3 and 5 steps
    assert [window.seeds.tolist() for window in planner.asked] == [
        [10, 11],
        [10, 11],
        [12, 11],
        [12],
        [12],
        [12],
        [12],
    ]
    assert [window.steps.tolist() for window in planner.asked] == [
        [0, 0],
        [1, 1],
        [0, 2],
        [1],
        [2],
        [3],
        [4],
    ]


def test_slots_without_an_episode_idle_and_are_reset_whenever_they_end() -> None:
    seen: list[list[int]] = []
    play(
        COUNTDOWN,
        [(5, 0)],  # 7 steps beside idle ones of 2
        slots=3,
        planner=FakePlanner(1),
        on_step=lambda envs, decision: seen.append(list(envs.get_attr("done"))),
    )
    assert seen == [[1, 1, 1], [2, 2, 2], [3, 1, 1], [4, 2, 2], [5, 1, 1], [6, 2, 2], [7, 1, 1]]


def test_starts_are_taken_only_when_a_slot_is_free() -> None:
    taken: list[int] = []

    def endless() -> Iterator[EpisodeStart]:
        for number in count():
            taken.append(number)
            yield 0, number

    with closing(make_vector(COUNTDOWN, 3)) as envs:
        endlessly = rollouts(envs, FakePlanner(1), endless())
        assert [rollout.number for rollout in islice(endlessly, 5)] == [0, 1, 2, 3, 4]
    assert taken == [0, 1, 2, 3, 4, 5]


def test_no_starts_give_no_episodes_and_no_requests() -> None:
    planner = FakePlanner(1)
    assert play(COUNTDOWN, [], slots=2, planner=planner) == []
    assert planner.asked == []


def test_an_episode_has_the_version_of_its_first_decision() -> None:
    planner = FakePlanner(1, versions=count(7))
    played = play(COUNTDOWN, [(0, 0), (3, 0), (1, 0)], slots=1, planner=planner)  # 2, 5, 3 steps
    assert [rollout.episode.version for rollout in played] == [7, 9, 14]


def test_the_planner_is_asked_to_explore_only_on_request() -> None:
    for explore in (False, True):
        planner = FakePlanner(1)
        play(COUNTDOWN, [(0, 0)], slots=1, planner=planner, explore=explore)
        assert planner.explored == [explore] * 2


def test_waypoints_reach_the_planner() -> None:
    planner, waypoints = FakePlanner(1), np.full((5, 2), 9, np.float32)
    play(COUNTDOWN, [(1, 0), (1, 1)], slots=2, planner=planner, waypoints=waypoints)
    nines = [(window.states == 9).all(axis=2).sum(axis=1).tolist() for window in planner.asked]
    assert nines == [[4, 4], [3, 3], [2, 2]]  # the rows after steps 0, 1, 2


@pytest.mark.parametrize("slots", [2, 3, 6])
def test_episodes_do_not_depend_on_the_number_of_slots(slots: int) -> None:
    starts = [evaluation_episode(4, number) for number in range(5)]
    alone = play("d4rl/Hopper-v2", starts, slots=1, planner=FakePlanner(3))
    beside = play("d4rl/Hopper-v2", starts, slots=slots, planner=FakePlanner(3))
    assert len({len(rollout.episode) for rollout in alone}) > 1
    beside.sort(key=lambda rollout: rollout.number)
    assert [as_bytes(rollout) for rollout in beside] == [as_bytes(rollout) for rollout in alone]


def test_environments_in_other_processes_play_the_same_episodes() -> None:
    starts = [evaluation_episode(4, number) for number in range(3)]
    here, there = (
        play("d4rl/Hopper-v2", starts, slots=2, planner=FakePlanner(3), processes=processes)
        for processes in (False, True)
    )
    assert [as_bytes(rollout) for rollout in there] == [as_bytes(rollout) for rollout in here]


@pytest.mark.parametrize(("env_id", "actions"), [("d4rl/Hopper-v2", 3), ("Pendulum-v1", 1)])
def test_an_episode_is_the_one_that_collect_plays(env_id: str, actions: int) -> None:
    reset_seed, planning_seed = evaluation_episode(0, 0)
    planner = FakePlanner(actions)
    (rollout,) = play(env_id, [(reset_seed, planning_seed)], slots=1, planner=planner)
    with closing(make(env_id)) as env:
        policy = Replayed(planner, planning_seed)
        expected = single_env.rollout(env, policy, seed=reset_seed, rng=None, version=3)
    episode = rollout.episode
    assert episode.states.tobytes() == expected.states.tobytes()
    assert episode.actions.tobytes() == expected.actions.tobytes()
    assert episode.rewards.tobytes() == expected.rewards.tobytes()
    assert (episode.terminated, episode.truncated) == (expected.terminated, expected.truncated)
    assert (episode.seed, episode.version) == (expected.seed, expected.version)


class Replayed:
    """The fake planner as a policy of one episode."""

    def __init__(self, planner: FakePlanner, seed: int) -> None:
        self._planner, self._seed, self._steps = planner, seed, count()

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        return self._planner.act(state, self._seed, next(self._steps))


def as_bytes(rollout: Rollout) -> tuple[int, ...] | tuple[Any, ...]:
    episode = rollout.episode
    arrays = (episode.states, episode.actions, episode.rewards, rollout.planning.target_returns)
    ends = (episode.terminated, episode.truncated, episode.seed, episode.version)
    return rollout.number, *ends, *(array.tobytes() for array in arrays)


def test_seeds_come_from_the_run_and_the_episode_alone() -> None:
    starts = {
        (run, number): evaluation_episode(run, number) for run in range(9) for number in range(9)
    }
    assert starts[1, 5] == evaluation_episode(1, 5)
    assert starts[1, 5][0] == data_episode(1, 5)[0]
    planning = {planning_seed for _, planning_seed in starts.values()}
    assert len(planning) == 81
    assert all(0 <= seed < 2**63 for seed in planning)
    assert max(planning) > 2**62


def test_environments_without_a_limit_of_steps_are_refused() -> None:
    with (
        closing(make_vector("Pendulum-v1", 1, max_episode_steps=-1)) as envs,
        pytest.raises(InputError, match="max_episode_steps"),
    ):
        next(rollouts(envs, FakePlanner(1), [(0, 0)]))


def test_actors_load_neither_torch_nor_ray() -> None:
    script = (
        "import sys, actors.episodes, m3pc.evaluation.episodes, m3pc.evaluation.video\n"
        "assert not {'torch', 'ray', 'mujoco', 'imageio_ffmpeg'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)
