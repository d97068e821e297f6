"""Environments by id: what they promise, what they refuse, and that together equals one by one."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Space
from gymnasium.utils.env_checker import check_env

from m3pc.envs import engine, make, make_vector, normalised_score, step_limit
from m3pc.types import InputError
from tests.support.episodes.shared_data import ROOT

D4RL = {  # id: sizes of state and action
    "d4rl/Hopper-v2": (11, 3),
    "d4rl/Walker2d-v2": (17, 6),
    "d4rl/HalfCheetah-v2": (17, 6),
}


class Toy(gymnasium.Env[Any, Any]):
    """Spaces of the test's choice; remembers the action that reached it."""

    def __init__(self, **spaces: Any) -> None:
        self.observation_space = spaces["observation_space"]
        self.action_space = spaces["action_space"]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.received = action
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.fixture
def toys() -> Iterator[None]:
    gymnasium.register("toy/Any-v0", entry_point=Toy, disable_env_checker=True)
    gymnasium.register("toy/Missing-v0", entry_point="no_such_package:Env")
    yield
    del gymnasium.registry["toy/Any-v0"], gymnasium.registry["toy/Missing-v0"]


UNIT = Box(-1, 1, (2,))


def test_importing_registers_the_ids_and_loads_no_engine() -> None:
    script = (
        "import sys, gymnasium, m3pc.envs\n"
        f"assert {set(D4RL)} <= set(gymnasium.registry)\n"
        "assert not {'mujoco', 'torch', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)


@pytest.mark.parametrize("env_id", D4RL)
def test_d4rl_environments_are_clean_for_gymnasiums_checker(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Positions and velocities have no bounds; the checker would rather they had.
        warnings.filterwarnings("ignore", ".*Box observation space m..imum value is -?infinity")
        with closing(gymnasium.make(env_id)) as env:
            check_env(env.unwrapped, skip_render_check=True)  # rendering needs a display


@pytest.mark.parametrize("env_id", D4RL)
def test_d4rl_environments_have_their_sizes_and_a_thousand_steps(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make(env_id)
    with closing(env):
        states, actions = D4RL[env_id]
        assert env.observation_space.shape == (states,)
        assert env.action_space == Box(-1, 1, (actions,))
        assert step_limit(env) == 1000


def test_an_episode_is_truncated_at_the_limit() -> None:
    with closing(make("d4rl/HalfCheetah-v2")) as env:
        env.reset(seed=0)
        ends = [env.step(np.zeros(6, np.float32))[2:4] for _ in range(1000)]
    assert ends == [(False, False)] * 999 + [(False, True)]


@pytest.mark.parametrize("env_id", D4RL)
def test_the_seed_decides_the_episode(env_id: str) -> None:
    first, again, other = (one_by_one(env_id, [seed], 50)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first[0] != other[0]).any()


def test_actions_of_pendulum_arrive_as_torques_of_its_own_bounds() -> None:
    actions = np.array([-1, -0.25, 0, 0.5, 1], np.float32)[:, None]  # bounds are -2 and 2
    with closing(make("Pendulum-v1")) as ours, closing(gymnasium.make("Pendulum-v1")) as plain:
        assert ours.action_space == Box(-1, 1, (1,))
        ours.reset(seed=0)
        plain.reset(seed=0)
        for action in actions:
            mapped, wanted = ours.step(action), plain.step(2 * action)
            np.testing.assert_array_equal(mapped[0], wanted[0])
            assert mapped[1] == wanted[1]
            assert ours.unwrapped.last_u == 2 * action[0]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("toys")
def test_the_ends_of_uneven_bounds_are_reached_and_never_passed() -> None:
    rng = np.random.default_rng(0)
    low = rng.uniform(-3, 3, 100).astype(np.float32)
    bounds = Box(low, low + rng.uniform(0.1, 5, 100).astype(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make("toy/Any-v0", observation_space=UNIT, action_space=bounds)
    env.reset(seed=0)
    toy: Any = env.unwrapped
    for sign, edge in ((-1, bounds.low), (1, bounds.high)):
        env.step(np.full(100, sign, np.float32))
        assert bounds.contains(toy.received)
        np.testing.assert_allclose(toy.received, edge, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("toys")
def test_observations_of_any_shape_become_one_row() -> None:
    env = make("toy/Any-v0", observation_space=Box(-1, 1, (3, 4)), action_space=UNIT)
    assert env.observation_space.shape == (12,)
    assert env.reset(seed=0)[0].shape == (12,)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("states", "actions", "named"),
    [
        (Dict(goal=UNIT), UNIT, "observations in Dict"),
        (UNIT, Dict(left=UNIT), "actions in Dict"),
        (UNIT, Box(-1, 1, (2, 2)), "actions in Box"),
        (UNIT, Box(-np.inf, 1, (2,)), "actions in Box"),
        (UNIT, Box(0, 3, (2,), np.int64), "actions in Box"),
        (UNIT, Box(np.zeros(2, np.float32), np.array([0, 1], np.float32)), "actions in Box"),
    ],
)
def test_spaces_that_do_not_fit_are_named(
    states: Space[Any], actions: Space[Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        make("toy/Any-v0", observation_space=states, action_space=actions)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("env_id", "named"),
    [
        ("CartPole-v1", r"actions in Discrete\(2\); expected a one-dimensional Box"),
        ("Hoper-v5", "close to it: Hopper-v5"),
        ("d4rl/Hoper-v2", "close to it: d4rl/Hopper-v2"),
        ("nowhere/Thing-v0", "Namespace nowhere not found"),
        ("Hopper-v2", "d4rl/Hopper-v2"),  # gymnasium knows this one, but cannot make it
        ("not an id", "Malformed environment ID"),
        ("a:b:c", "Check the id"),
        ("no_such_package:Thing-v0", "Install the package it needs"),
        ("toy/Missing-v0", "No module named 'no_such_package'. Install the package it needs"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")  # Hopper-v2
def test_ids_that_cannot_be_used_say_what_to_do(env_id: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        make(env_id)
    with pytest.raises(InputError, match=named):
        make_vector(env_id, 2)


def test_unknown_arguments_are_an_input_error() -> None:
    with pytest.raises(InputError, match=r"'gravitas'.*Check the arguments"):
        make("Pendulum-v1", gravitas=9.81)


def test_a_limit_of_steps_is_read_given_or_required() -> None:
    assert step_limit(make("Pendulum-v1")) == 200
    assert step_limit(make("Pendulum-v1", max_episode_steps=7)) == 7
    with closing(make_vector("Pendulum-v1", 2, max_episode_steps=7)) as envs:
        assert step_limit(envs) == 7
    with pytest.raises(InputError, match="max_episode_steps"):
        step_limit(make("Pendulum-v1", max_episode_steps=-1))


@pytest.mark.usefixtures("toys")
def test_an_environment_that_only_this_process_knows_is_an_input_error() -> None:
    with pytest.raises(InputError, match="not in another; give the module that registers it"):
        make_vector("toy/Any-v0", 2, processes=True, observation_space=UNIT, action_space=UNIT)


def test_no_environments_are_refused() -> None:
    with pytest.raises(InputError, match="0 environments"):
        make_vector("Pendulum-v1", 0)


def plan(env_id: str, seed: int, steps: int) -> Any:
    """Actions [steps, A] of one environment."""
    with closing(make(env_id)) as env:
        shape = (steps, *env.action_space.shape)  # type: ignore[misc]
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def one_by_one(env_id: str, seeds: list[int], steps: int) -> list[Any]:
    """For each seed its rows of state, reward, terminated, truncated; an end resets unseeded."""
    runs = []
    for seed in seeds:
        with closing(make(env_id, max_episode_steps=20)) as env:
            rows = [[*env.reset(seed=seed)[0], 0, 0, 0]]
            for action in plan(env_id, seed, steps):
                states, reward, terminated, truncated, _ = env.step(action)
                rows.append([*states, reward, terminated, truncated])
                if terminated or truncated:
                    rows.append([*env.reset()[0], 0, 0, 0])
        runs.append(np.array(rows, np.float64))
    return runs


def together(env_id: str, seeds: list[int], steps: int, processes: bool) -> list[Any]:
    """The same rows from environments stepped together, each reset by the mask when it ends."""
    plans = np.stack([plan(env_id, seed, steps) for seed in seeds], axis=1)  # [steps, count, A]
    with closing(make_vector(env_id, len(seeds), processes=processes, max_episode_steps=20)) as env:
        states, _ = env.reset(seed=seeds)  # type: ignore[arg-type]
        runs = [[[*state, 0, 0, 0]] for state in states]
        for actions in plans:
            states, rewards, terminated, truncated, _ = env.step(actions)
            ended = terminated | truncated
            for run, *row in zip(runs, states, rewards, terminated, truncated, strict=True):
                run.append([*row[0], *row[1:]])
            if ended.any():
                after, _ = env.reset(options={"reset_mask": ended})
                np.testing.assert_array_equal(after[~ended], states[~ended])
                for index in np.flatnonzero(ended):
                    runs[index].append([*after[index], 0, 0, 0])
    return [np.array(run, np.float64) for run in runs]


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("env_id", ["d4rl/Hopper-v2", "Pendulum-v1"])
def test_together_is_one_by_one_to_the_bit(env_id: str, processes: bool) -> None:
    seeds, steps = [5, 6, 7], 50
    alone = one_by_one(env_id, seeds, steps)
    assert all(len(run) > steps + 1 for run in alone)  # every environment was reset on the way
    for expected, rows in zip(alone, together(env_id, seeds, steps, processes), strict=True):
        np.testing.assert_array_equal(rows, expected)


def test_an_environment_that_ended_waits_to_be_reset() -> None:
    actions = np.zeros((2, 1), np.float32)
    with closing(make_vector("Pendulum-v1", 2, max_episode_steps=3)) as envs:
        envs.reset(seed=[0, 1])  # type: ignore[arg-type]
        ends = [list(envs.step(actions)[3]) for _ in range(3)]
        assert ends == [[False, False], [False, False], [True, True]]
        with pytest.raises(AssertionError):
            envs.step(actions)
        envs.reset(options={"reset_mask": np.array([True, True])})
        assert list(envs.step(actions)[3]) == [False, False]


def test_hoppers_that_fall_at_different_steps_reset_at_different_steps() -> None:
    lengths = {len(run) for run in one_by_one("d4rl/Hopper-v2", [5, 6, 7], 50)}
    assert len(lengths) > 1


@pytest.mark.parametrize(
    ("robot", "random", "expert"),
    [
        ("Hopper", -20.272305, 3234.3),
        ("Walker2d", 1.629008, 4592.3),
        ("HalfCheetah", -280.178953, 12135.0),
    ],
)
def test_scores_are_0_at_random_and_100_at_expert(robot: str, random: float, expert: float) -> None:
    for env_id in (f"d4rl/{robot}-v2", f"{robot}-v4", f"{robot}-v5", robot):
        assert normalised_score(env_id, random) == 0
        assert normalised_score(env_id, expert) == 100
        assert normalised_score(env_id, (random + expert) / 2) == pytest.approx(50)


@pytest.mark.parametrize("env_id", ["Ant-v5", "Pendulum-v1", "other/Hopper-v2", "Hopper-medium-v2"])
def test_scores_of_unknown_environments_are_none(env_id: str) -> None:
    assert normalised_score(env_id, 1.0) is None


def test_the_engine_has_a_name_and_a_version() -> None:
    with make("d4rl/Hopper-v2") as hopper, make("Pendulum-v1") as pendulum:
        assert engine(hopper) == f"mujoco {metadata.version('mujoco')}"
        assert engine(pendulum) == f"gymnasium {metadata.version('gymnasium')}"
