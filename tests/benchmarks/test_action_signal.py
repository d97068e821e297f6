"""The benchmark of inverse dynamics: how the next state depends on the action, in the simulator."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from benchmarks.action_signal import CHANGE, next_state, sensitivity
from m3pc.envs import make


@pytest.fixture(scope="module")
def cheetah() -> Iterator[Any]:
    with closing(make("d4rl/HalfCheetah-v2")) as env:
        env.reset(seed=0)
        yield env


def test_a_step_can_be_repeated_from_the_state_alone(cheetah: Any) -> None:
    with closing(make("d4rl/HalfCheetah-v2")) as env:
        rng, state = np.random.default_rng(1), env.reset(seed=1)[0].astype(np.float64)
        for _ in range(20):
            action = rng.uniform(-1, 1, 6)
            following = env.step(action)[0]
            assert next_state(cheetah, state, action) == pytest.approx(following, abs=1e-5)
            state = following


def test_sensitivity_is_inversely_proportional_to_the_unit(cheetah: Any) -> None:
    state, action = np.zeros(17), np.zeros(6, np.float32)
    values = sensitivity(cheetah, state.astype(np.float32), action, np.ones(17))
    assert values.shape == (6,)
    assert (np.diff(values) <= 0).all()
    assert values[-1] > 0
    halved = sensitivity(cheetah, state.astype(np.float32), action, np.full(17, 2.0))
    assert halved == pytest.approx(values / 2)


def test_an_action_at_its_bound_is_changed_within_its_bounds(cheetah: Any) -> None:
    state, bounds = np.zeros(17, np.float32), np.ones(6, np.float32)
    inside = sensitivity(cheetah, state, (1 - CHANGE) * bounds, np.ones(17))
    assert sensitivity(cheetah, state, bounds, np.ones(17)) == pytest.approx(inside)
