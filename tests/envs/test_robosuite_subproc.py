"""Environments in a few processes, and the success rate of tasks that have one."""

import gc
import json
import math
import multiprocessing
import os
import sys
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from m3pc.envs import make_vector
from m3pc.envs.subproc_vector import SubprocVectorEnv
from m3pc.evaluation.episodes import Evaluation, evaluate
from m3pc.evaluation.jobs import slots_and_processes
from m3pc.types import InputError
from tests.support.fakes.fake_planner import FakePlanner

MASK = np.array([True, False, True])


def test_environments_in_processes_give_what_they_give_in_one() -> None:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (6, 3, 1)).astype(np.float32)
    seen = []
    both: tuple[Any, ...] = (
        make_vector("Pendulum-v1", 3, max_episode_steps=4),
        SubprocVectorEnv("Pendulum-v1", 3, processes=2, max_episode_steps=4),
    )
    for envs in both:
        with closing(envs):
            arrays = [envs.reset(seed=[1, 2, 3])[0]]
            for step in range(4):
                arrays += envs.step(actions[step])[:4]
            again = {"reset_mask": np.ones(3, np.bool_)}
            arrays.append(envs.reset(seed=[4, 5, 6], options=again)[0])
            arrays += envs.step(actions[4])[:4]
            assert envs.spec is not None and envs.spec.max_episode_steps == 4
            seen.append(arrays)
    for left, right in zip(*seen, strict=True):
        np.testing.assert_array_equal(left, right)
    assert seen[0][16].all()  # the clock ended them after four steps
    assert multiprocessing.active_children() == []


def test_an_environment_without_a_seed_is_not_stepped_and_the_others_are_left_alone() -> None:
    with closing(SubprocVectorEnv("Pendulum-v1", 3, processes=2, max_episode_steps=4)) as envs:
        envs.reset(seed=[1, 2, 3])
        states, *_ = envs.step(np.ones((3, 1), np.float32))
        after, _ = envs.reset(seed=[None, None, 7], options={"reset_mask": MASK})
        np.testing.assert_array_equal(after[:2], states[:2])
        assert (after[2] != states[2]).any()
        for _ in range(3):
            last, _, _, truncated, _ = envs.step(np.ones((3, 1), np.float32))
        np.testing.assert_array_equal(last[0], states[0])
        assert truncated.tolist() == [False, True, False]  # the first would have ended as well


def test_what_an_environment_raises_in_a_process_is_reported() -> None:
    reason = r"Pendulum-v1 in a process of its own: Error: .*-5"
    with (
        closing(SubprocVectorEnv("Pendulum-v1", 2, processes=2)) as envs,
        pytest.raises(InputError, match=reason),
    ):
        envs.reset(seed=[1, -5])
    assert multiprocessing.active_children() == []


def test_a_process_that_ends_is_reported() -> None:
    with closing(SubprocVectorEnv("Pendulum-v1", 2, processes=2)) as envs:
        envs.reset(seed=[1, 2])
        multiprocessing.active_children()[0].kill()
        with pytest.raises(InputError, match="Pendulum-v1 in a process of its own: it ended"):
            envs.step(np.ones((2, 1), np.float32))
    assert multiprocessing.active_children() == []


def test_an_environment_that_cannot_be_made_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(InputError, match="nothing-v0"):
        SubprocVectorEnv("nothing-v0", 2, processes=2)
    gc.collect()
    assert unraisable == []


def test_environments_that_are_heavy_are_fewer_and_on_all_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert slots_and_processes('robosuite/Lift {"control_freq": 10}') == (16, cores)
    assert slots_and_processes("robosuite/Lift", 3) == (16, 3)
    assert slots_and_processes("d4rl/Hopper-v2") == (32, 1)
    assert slots_and_processes("d4rl/Hopper-v2", 3) == (32, 3)


def test_an_evaluation_does_not_depend_on_the_processes() -> None:
    numbers = []
    for processes in (1, 2, 3):
        result = evaluate(
            "Pendulum-v1",
            FakePlanner(1),
            episodes=5,
            seed=2,
            slots=3,
            processes=processes,
            max_episode_steps=6,
            clock=lambda: 0.0,
        )
        numbers.append(result.as_json())
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(numbers[0]["returns"]) == 5


@pytest.mark.skipif(find_spec("robosuite") is None, reason="robosuite is not installed")
def test_an_evaluation_of_a_task_does_not_depend_on_the_processes() -> None:
    numbers = [
        evaluate(
            "robosuite/CanLim",
            FakePlanner(7),
            episodes=3,
            seed=2,
            slots=2,
            processes=processes,
            max_episode_steps=8,
            clock=lambda: 0.0,
        ).as_json()
        for processes in (1, 2)
    ]
    assert numbers[0] == numbers[1]
    assert numbers[0]["successes"] == [False] * 3
    assert numbers[0]["lengths"] == [8] * 3


def evaluation(env_id: str, returns: list[float]) -> Evaluation:
    ones = np.ones(len(returns))
    return Evaluation(
        env_id=env_id,
        engine="by hand 1.0",
        seed=0,
        returns=np.array(returns),
        lengths=np.full(len(returns), 20),
        effective_candidates=math.nan * ones,
        utility_std=math.nan * ones,
        first_target_returns=ones,
        mean_target_returns=ones,
        decisions=60,
        seconds=4.0,
    )


def test_a_task_has_a_success_rate_with_its_interval() -> None:
    result = evaluation('robosuite/Lift {"control_freq": 10}', [1, 0, 1])
    assert result.success_rate == pytest.approx(2 / 3)
    assert result.success_interval == pytest.approx((0.2076602, 0.9385081), abs=1e-6)
    kept = json.loads(json.dumps(result.as_json()))
    assert kept["successes"] == [True, False, True]
    assert kept["success_interval"] == pytest.approx(result.success_interval)
    again = Evaluation.from_json(kept)
    assert again.as_json() == result.as_json()


def test_an_environment_without_success_has_no_rate() -> None:
    result = evaluation("d4rl/Hopper-v2", [1, 0, 1])
    assert (result.successes, result.success_rate, result.success_interval) == (None, None, None)
    assert not [name for name in result.as_json() if name.startswith("success")]
