"""Scripts in robosuite: good ones succeed, thrown cans lie outside, pairs begin alike."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from actors.single_env import play
from m3pc.core.manipulation_tasks import FLOOR
from m3pc.datagen.from_scripts import succeeded
from m3pc.datagen.policies.scripted import SCHEDULES, STEPS_AFTER_FALL
from m3pc.envs import make
from m3pc.types import Episode

pytest.importorskip("robosuite", reason="robosuite is not installed: pip install 'm3pc[robosuite]'")

LIFT, CAN, CAN_LIM = SCHEDULES
SEED = 41  # not used for tuning the scripts


@pytest.fixture(scope="module")
def can() -> Iterator[Any]:
    with closing(make(CAN)) as env:
        yield env


@pytest.fixture(scope="module")
def pair(can: Any) -> list[Episode]:
    return [play(can, SCHEDULES[CAN]["paired"], seed=SEED, number=number) for number in (2, 3)]


def successes(env: Any, env_id: str, count: int) -> int:
    schedule = SCHEDULES[env_id]["good"]
    return sum(succeeded(play(env, schedule, seed=SEED, number=n)) for n in range(count))


def test_the_good_script_lifts_cubes_that_it_never_saw() -> None:
    with closing(make(LIFT)) as env:
        assert successes(env, LIFT, 3) == 3


def test_the_good_script_places_cans_that_it_never_saw(can: Any) -> None:
    assert successes(can, CAN, 2) == 2


def test_a_pair_begins_alike_to_the_bit_and_ends_differently(pair: list[Episode]) -> None:
    good, bad = pair
    assert good.seed == bad.seed
    assert good.states[0].tobytes() == bad.states[0].tobytes()
    assert good.actions[0].tobytes() != bad.actions[0].tobytes()
    assert (good.rewards.sum(), bad.rewards.sum()) == (1, 0)


def test_a_thrown_can_lies_outside_and_its_episode_was_cut_short(pair: list[Episode]) -> None:
    _, bad = pair
    cans = bad.states[:, 9:12]
    assert cans[-1, 2] < FLOOR < cans[0, 2]
    assert (cans[:-1, 2] < FLOOR).sum() == STEPS_AFTER_FALL
    assert (bad.terminated, bad.truncated) == (False, False)
    low, high = (
        np.array(SCHEDULES[CAN]["paired"].task.low),
        np.array(SCHEDULES[CAN]["paired"].task.high),
    )
    assert ((cans[-1, :2] < low) | (cans[-1, :2] > high)).any()


def test_the_limited_can_shows_the_first_numbers_of_the_complete_state(pair: list[Episode]) -> None:
    good, _ = pair
    with closing(make(CAN_LIM)) as env:
        limited = play(env, SCHEDULES[CAN_LIM]["paired"], seed=SEED, number=2)
    assert limited.states.tobytes() == np.ascontiguousarray(good.states[:, :12]).tobytes()
    assert limited.actions.tobytes() == good.actions.tobytes()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("env_id", [LIFT, CAN])
def test_the_good_scripts_succeed_in_nearly_all_of_fifty_episodes(env_id: str) -> None:
    with closing(make(env_id)) as env:
        assert successes(env, env_id, 50) >= 48
