import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3pc.core.returns import ReturnRule, returns_to_go, steps_within

REWARDS = np.array([1, 2, 3], np.float32)
ONE = np.array([3])


def test_average_without_the_current_reward_is_the_released_codes_worked_example() -> None:
    rule = ReturnRule(max_episode_steps=5, include_now=False)
    assert returns_to_go(REWARDS, ONE, rule).tolist() == [1.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ReturnRule(max_episode_steps=5), [6 / 5, 5 / 4, 3 / 3]),
        (ReturnRule(max_episode_steps=5, average=False), [6, 5, 3]),
        (ReturnRule(max_episode_steps=5, average=False, include_now=False), [5, 3, 0]),
        (ReturnRule(max_episode_steps=5, average=False, discount=0.5), [1 + 1 + 0.75, 3.5, 3]),
        (
            ReturnRule(max_episode_steps=5, average=False, discount=0.5, include_now=False),
            [3.5, 3, 0],
        ),
        (ReturnRule(max_episode_steps=3), [6 / 3, 5 / 2, 3 / 1]),
    ],
)
def test_each_rule_on_three_rewards(rule: ReturnRule, expected: list[float]) -> None:
    assert returns_to_go(REWARDS, ONE, rule).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("include_now", [True, False])
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_a_sum_in_equal_parts_has_the_returns_of_its_scale(
    average: bool, include_now: bool, discount: float
) -> None:
    """Five rewards of 3: at step t there are 3 * (5 - t) to come."""
    rule = ReturnRule(
        max_episode_steps=5, average=average, include_now=include_now, discount=discount
    )
    returns = returns_to_go(np.full(5, 3, np.float32), np.array([5]), rule)
    steps = np.arange(5)
    assert (3 * (5 - steps) * rule.scale(steps)).tolist() == pytest.approx(returns.tolist())


def test_in_average_mode_a_sum_is_shared_by_the_steps_that_are_left() -> None:
    assert ReturnRule(max_episode_steps=5).scale(np.array([0, 3, 4, 5])).tolist() == [
        1 / 5,
        1 / 2,
        1,
        1,
    ]


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.sampled_from([1.0, 0.9]),
    st.booleans(),
    st.booleans(),
)
def test_many_episodes_at_once_equal_each_alone(
    lengths: list[int], discount: float, average: bool, include_now: bool
) -> None:
    rewards = np.arange(1, sum(lengths) + 1, dtype=np.float32)
    rule = ReturnRule(
        max_episode_steps=7, average=average, include_now=include_now, discount=discount
    )
    together = returns_to_go(rewards, np.array(lengths), rule)
    parts = np.split(rewards, np.cumsum(lengths)[:-1])
    alone = [returns_to_go(part, np.array([len(part)]), rule) for part in parts]
    assert together.tolist() == np.concatenate(alone).tolist()


def test_a_long_episode_loses_no_precision() -> None:
    rewards = np.full(1_000_000, 0.1, np.float32)
    rule = ReturnRule(max_episode_steps=1_000_000, average=False)
    first = returns_to_go(rewards, np.array([1_000_000]), rule)[0]
    assert first == np.float32(np.float64(np.float32(0.1)) * 1_000_000)


def test_steps_count_from_zero_in_every_episode() -> None:
    assert steps_within(np.array([3, 1, 2])).tolist() == [0, 1, 2, 0, 0, 1]
