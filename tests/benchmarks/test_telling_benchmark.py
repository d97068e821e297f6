"""How much the next state tells of an action, in the simulator itself."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from benchmarks.telling import CHANGE, after, shown
from m3pc.envs import make


@pytest.fixture(scope="module")
def cheetah() -> Iterator[Any]:
    with closing(make("d4rl/HalfCheetah-v2")) as env:
        env.reset(seed=0)
        yield env


def test_a_step_is_taken_again_from_the_state_alone(cheetah: Any) -> None:
    with closing(make("d4rl/HalfCheetah-v2")) as env:
        rng, state = np.random.default_rng(1), env.reset(seed=1)[0].astype(np.float64)
        for _ in range(20):
            action = rng.uniform(-1, 1, 6)
            following = env.step(action)[0]
            assert after(cheetah, state, action) == pytest.approx(following, abs=1e-5)
            state = following


def test_what_shows_less_in_units_that_are_larger_is_as_much_less(cheetah: Any) -> None:
    state, action = np.zeros(17), np.zeros(6, np.float32)
    found = shown(cheetah, state.astype(np.float32), action, np.ones(17))
    assert found.shape == (6,)
    assert (np.diff(found) <= 0).all()
    assert found[-1] > 0
    halved = shown(cheetah, state.astype(np.float32), action, np.full(17, 2.0))
    assert halved == pytest.approx(found / 2)


def test_an_action_at_its_end_is_changed_within_its_bounds(cheetah: Any) -> None:
    state, ends = np.zeros(17, np.float32), np.ones(6, np.float32)
    inside = shown(cheetah, state, (1 - CHANGE) * ends, np.ones(17))
    assert shown(cheetah, state, ends, np.ones(17)) == pytest.approx(inside)
