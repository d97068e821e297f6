"""An environment's name: an id, and what it is made with."""

from contextlib import closing

import numpy as np
import pytest

from m3pc.core.env_ids import join_env_name, refuse_foreign_code, split_env_name
from m3pc.envs import make, normalised_score, robot
from m3pc.types import InputError

UPRIGHT = 'd4rl/Hopper-v2 {"terminate_when_unhealthy": false}'


@pytest.mark.parametrize("name", ["Hopper-v4", UPRIGHT, 'a/B-v0 {"x": {"y": [1, "}"]}}'])
def test_a_name_is_split_and_joined_again(name: str) -> None:
    assert join_env_name(*split_env_name(name)) == name


def test_arguments_in_another_order_are_the_same_name() -> None:
    assert join_env_name(*split_env_name('E-v0 {"b": 1, "a": 2}')) == join_env_name(
        *split_env_name('E-v0   {"a": 2, "b": 1}')
    )


NO_NAMES = ["E-v0 {", "E-v0 {no json}", "E-v0 {} x", 'E-v0 {"x": 1', 'E-v0 {"x": ' + "[" * 100_000]


@pytest.mark.parametrize("name", NO_NAMES, ids=range(len(NO_NAMES)))
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="environment") as refused:
        split_env_name(name)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(("name", "ends"), [("d4rl/Hopper-v2", True), (UPRIGHT, False)])
def test_an_environment_is_made_with_its_arguments(name: str, ends: bool) -> None:
    with closing(make(name)) as env:
        env.reset(seed=0)
        fell = [env.step(np.array([1, -1, 1], np.float32))[2] for _ in range(200)]
    assert any(fell) is ends


def test_what_the_caller_gives_wins_over_the_name() -> None:
    with closing(make('d4rl/Hopper-v2 {"max_episode_steps": 7}', max_episode_steps=5)) as env:
        assert env.spec is not None and env.spec.max_episode_steps == 5


def test_an_argument_that_the_environment_does_not_take_is_refused() -> None:
    with pytest.raises(InputError, match="wings"):
        make('d4rl/Hopper-v2 {"wings": 2}')


def test_a_score_belongs_to_the_plain_environment() -> None:
    assert robot(UPRIGHT) == "Hopper"
    assert normalised_score("d4rl/Hopper-v2", 3234.3) == pytest.approx(100)
    assert normalised_score(UPRIGHT, 3234.3) is None


@pytest.mark.parametrize("name", ["os:Env-v0", UPRIGHT])
def test_a_file_does_not_choose_what_is_run_or_opened(name: str) -> None:
    with pytest.raises(InputError, match="--env"):
        refuse_foreign_code(name, "runs/stranger")
    refuse_foreign_code("d4rl/Hopper-v2", "runs/own")


@pytest.mark.parametrize("number", ["1" * 400, "-" + "1" * 400, "1e999", "NaN"])
def test_values_that_are_not_finite_numbers_are_unknown_arguments(number: str) -> None:
    with pytest.raises(InputError, match="controller"):
        refuse_foreign_code(f'robosuite/Lift {{"controller": {{"kp": {number}}}}}', "runs/stranger")
    refuse_foreign_code('robosuite/Lift {"controller": {"kp": 100}}', "runs/own")
