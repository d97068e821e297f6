"""Utilities of plans: numbers by hand, and a world whose best plan is known."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from planner.forward import Guidance, Imagined, PlanningBatch, lambda_return, score, softmax_weights
from tests.support.models.small_weights import MAX_EPISODE_STEPS, tiny_config


@pytest.mark.parametrize(
    ("rewards", "values", "start", "expected"),
    [
        ([1, 1, 1, 1], [10, 10, 10, 10], 0, 11.05129144),
        ([1, 1, 1, 1], [10, 10, 10, 10], 1, 10.94077853),
        ([1, 2, 3, 4], [5, 1, 2, 8], 0, 6.144450272),
        ([9], [4], 0, 4.0),
    ],
)
def test_lambda_return_has_the_known_values(
    rewards: list[float], values: list[float], start: int, expected: float
) -> None:
    value = lambda_return(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        discount=0.99,
        lam=0.6,
        start=start,
    )
    assert value.item() == pytest.approx(expected, rel=1e-9)


def test_the_last_reward_is_not_used() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 5.0, 6.0]])
    changed = rewards + torch.tensor([0, 0, 100.0])
    one, other = (lambda_return(x, values, discount=0.9, lam=0.5) for x in (rewards, changed))
    assert one.item() == other.item()


def test_weights_are_a_softmax_on_one_scale() -> None:
    utilities = torch.tensor([[0.0, 1.0, 2.0], [0.0, 100.0, 200.0]])
    raw = softmax_weights(utilities, inverse_temperature=1.0, standardised=False)
    assert raw.weights[0].tolist() == pytest.approx([0.09003, 0.24473, 0.66524], abs=1e-5)
    assert raw.weights[1].tolist() == pytest.approx([0, 0, 1], abs=1e-9)
    scaled = softmax_weights(utilities, inverse_temperature=1.0, standardised=True)
    assert scaled.weights[0].tolist() == pytest.approx(scaled.weights[1].tolist(), abs=1e-6)
    assert scaled.utility_std.tolist() == pytest.approx([0.81650, 81.650], rel=1e-4)
    same = softmax_weights(torch.full((1, 4), 3.0), inverse_temperature=5.0, standardised=True)
    assert same.effective_candidates.item() == pytest.approx(4)


# A world with a known best plan: to push costs 1 now and pays 3 two steps later.

STEPS_LEFT = 4
PUSHES = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * STEPS_LEFT)[None, :, :, None]


def rewards_of(plans: Tensor) -> Tensor:
    """Reward of each step: [E, N, h]."""
    pushed = plans[..., 0]
    return 3 * torch.nn.functional.pad(pushed, (2, 0))[..., :STEPS_LEFT] - pushed


def push_world(plans: Tensor) -> Imagined:
    """What follows each plan, exactly. The state: whether earlier pushes will still pay."""
    pushed, rewards = plans[..., 0], rewards_of(plans)
    before = torch.nn.functional.pad(pushed, (2, 0))
    states = torch.stack([before[..., 1:-1], before[..., :-2]], dim=-1)  # one step ago, two ago
    left = STEPS_LEFT - torch.arange(STEPS_LEFT)
    return Imagined(
        states=states,
        rewards=rewards[..., :-1],
        returns=rewards.flip(-1).cumsum(-1).flip(-1) / left,
    )


def short_sighted_q(states: Tensor, actions: Tensor) -> Tensor:
    """The reward now and what earlier pushes will still pay, but not what this push will pay: only
    imagined rewards show the value of a push."""
    return 3 * states[:, 1] + 3 * 0.9 * states[:, 0] - actions[:, 0]


def best_plan(guidance: Guidance, **changes: object) -> list[float]:
    config = tiny_config("small", **{"planner__discount": 0.9} | changes)
    batch = PlanningBatch(
        states=torch.zeros(1, 8, 2),
        actions=torch.zeros(1, 8, 1),
        now=4,
        steps=torch.tensor([MAX_EPISODE_STEPS - STEPS_LEFT]),
        target_returns=torch.zeros(1),
        max_episode_steps=MAX_EPISODE_STEPS,
    )
    imagined = push_world(PUSHES)
    if guidance == "q0":
        imagined = replace(imagined, states=imagined.states[:, :, :1])
    utilities = score(imagined, PUSHES, batch, config, guidance, short_sighted_q)
    pushes: list[float] = PUSHES[0, utilities[0].argmax(), :, 0].tolist()
    return pushes


def test_in_a_known_world_the_best_plan_gets_the_best_utility() -> None:
    """Pushes at steps 0 and 1 pay at 2 and 3, which is where m's returns end; the critic at the
    last step also knows that a push at 2 will pay, as the episode goes on for it."""
    assert best_plan("m") == [1, 1, 0, 0]
    assert best_plan("m", planner__lam=1.0) == [1, 1, 0, 0]
    assert best_plan("q", planner__lam=1.0) == [1, 1, 1, 0]


def test_in_a_known_world_shorter_sight_finds_another_plan() -> None:
    """Without imagined rewards no push pays; with a discount g, one does if 3 g^2 > 1."""
    assert best_plan("q", planner__lam=0.0)[0] == 0
    assert best_plan("q0")[0] == 0
    assert best_plan("q", planner__lam=1.0, planner__discount=0.59) == [1, 1, 1, 0]
    assert best_plan("q", planner__lam=1.0, planner__discount=0.56) == [0, 0, 1, 0]
