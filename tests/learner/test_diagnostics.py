"""Measurements on held-out episodes: by hand, and against the dense reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import reference
from learner.diagnostics import measure_critic, measure_model
from m3pc.config.schema import Config, CriticConfig
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic, EnsembleMLP
from m3pc.model.layers import LinearActionHead
from m3pc.model.normalisation import Normaliser
from m3pc.model.weights import Weights
from m3pc.types import TransitionBatch, WindowBatch
from tests.support.models.small_weights import (
    ACTIONS,
    STATES,
    tiny_config,
    tiny_weights,
    window_batch,
)

T = 8
PLAIN = Normaliser.from_arrays(
    {
        f"{name}.{part}": np.full(size, part == "std", np.float32)
        for name, size in (("states", STATES), ("rewards", 1), ("returns", 1))
        for part in ("mean", "std")
    }
)


def counting() -> WindowBatch[NDArray[Any]]:
    """Two rows: every state number is the step, or three times it; the rest is 0."""
    steps = np.arange(T, dtype=np.float32)
    states = np.stack([steps, 3 * steps])[:, :, None].repeat(STATES, axis=2)
    flat = np.zeros((2, T), np.float32)
    return WindowBatch(
        states=states,
        actions=flat[..., None].repeat(ACTIONS, axis=2),
        rewards=flat,
        returns=flat,
        steps=np.zeros(2, np.int64),
    )


def constant_model(config: Config) -> TrajectoryModel:
    """A model that always predicts states 1, rewards 2, returns 3 and actions tanh(0.5)."""
    model = tiny_weights(config).model()
    with torch.no_grad():
        for name, number in (("states", 1.0), ("rewards", 2.0), ("returns", 3.0)):
            last = model.get_submodule(f"heads.{name}.3")
            assert isinstance(last, torch.nn.Linear)
            last.weight.zero_()
            last.bias.fill_(number)
        head = model.heads["actions"]
        assert isinstance(head, LinearActionHead)
        head.mu.weight.zero_()
        head.mu.bias.fill_(0.5)
    return model


# The model


@pytest.mark.parametrize(
    ("horizon", "next_step", "last_step"),
    [
        (4, (1 + 9) / 2, (9 + 81) / 2),  # now is 4: 5 is 1 away, 7 is 3 away; thrice in row 2
        (2, (1 + 9) / 2, (1 + 9) / 2),
        (7, (1 + 9) / 2, (36 + 324) / 2),
    ],
)
def test_the_error_of_copying_the_current_state_is_how_far_the_state_moves(
    horizon: int, next_step: float, last_step: float
) -> None:
    config = tiny_config(planner__horizon=horizon)
    errors = measure_model(tiny_weights(config).model(), PLAIN, config, [counting()])
    assert errors["copy_1"] == pytest.approx(next_step)
    assert errors["copy_h"] == pytest.approx(last_step)


def test_errors_are_in_the_space_of_the_model() -> None:
    """States are divided by their deviation, errors by its square; the mean cancels."""
    config = tiny_config()
    scales = {"states.mean": 7.0, "states.std": 2.0, "rewards.mean": 0.0, "returns.mean": 0.0}
    sizes = {"states": STATES, "rewards": 1, "returns": 1}
    arrays = {
        f"{name}.{part}": np.full(size, scales.get(f"{name}.{part}", 1.0), np.float32)
        for name, size in sizes.items()
        for part in ("mean", "std")
    }
    measured = measure_model(
        constant_model(config), Normaliser.from_arrays(arrays), config, [counting()]
    )
    assert measured["copy_1"] == pytest.approx((1 + 9) / 2 / 4)
    # in row 1 the state after now is (5 - 7) / 2 = -1 where 1 was answered, in row 2 (15 - 7) / 2
    assert measured["state_1"] == pytest.approx(((-1 - 1) ** 2 + (4 - 1) ** 2) / 2)
    assert measured["state_h"] == pytest.approx(((0 - 1) ** 2 + (7 - 1) ** 2) / 2)


def test_errors_of_a_constant_model() -> None:
    """Rewards and returns count from the current step on, actions at the current step only."""
    config, batch = tiny_config(), counting()
    batch.rewards[:, :4], batch.returns[:, :4] = 100, 100
    batch.actions[:] = 0.9
    batch.actions[:, 4] = 0.1
    errors = measure_model(constant_model(config), PLAIN, config, [batch])
    assert errors["state_1"] == pytest.approx(((5 - 1) ** 2 + (15 - 1) ** 2) / 2)
    assert errors["state_h"] == pytest.approx(((7 - 1) ** 2 + (21 - 1) ** 2) / 2)
    assert errors["reward"] == pytest.approx(4)
    assert errors["return"] == pytest.approx(9)
    assert errors["action"] == pytest.approx((math.tanh(0.5) - 0.1) ** 2, rel=1e-5)


def reference_outputs(
    weights: Weights, batch: WindowBatch[NDArray[Any]], pattern: str, now: int
) -> tuple[reference.Outputs, dict[str, Tensor]]:
    """The dense reference's prediction under a pattern, and the truth, both normalised."""
    normaliser = weights.normaliser()
    truth = {
        "states": normaliser.states.encode(torch.from_numpy(batch.states)),
        "actions": torch.from_numpy(batch.actions),
        "rewards": normaliser.rewards.encode(torch.from_numpy(batch.rewards)[..., None]),
        "returns": normaliser.returns.encode(torch.from_numpy(batch.returns)[..., None]),
    }
    state = weights.model().state_dict()
    mask = reference.mask(pattern, now, T)
    return reference.network(state, weights.config.model, truth, mask), truth


@pytest.mark.parametrize("horizon", [2, 4])
@torch.no_grad()
def test_the_model_is_measured_with_the_masks_of_planning(horizon: int) -> None:
    """Dynamics for states, rewards and returns, policy for the action, at the same current step."""
    config = tiny_config(planner__horizon=horizon)
    weights, batch, now = tiny_weights(config), window_batch(3), T - horizon
    errors = measure_model(weights.model(), weights.normaliser(), config, [batch])
    ahead, truth = reference_outputs(weights, batch, "dynamics", now)
    policy, between, towards = (
        reference_outputs(weights, batch, pattern, now)[0].mu[:, now].tanh()
        for pattern in ("policy", "inverse", "path")
    )
    actions = truth["actions"][:, now]
    answers = {
        "state_1": (ahead.states[:, now + 1], truth["states"][:, now + 1]),
        "state_h": (ahead.states[:, -1], truth["states"][:, -1]),
        "copy_1": (truth["states"][:, now], truth["states"][:, now + 1]),
        "copy_h": (truth["states"][:, now], truth["states"][:, -1]),
        "reward": (ahead.rewards[:, now:], truth["rewards"][:, now:]),
        "return": (ahead.returns[:, now:], truth["returns"][:, now:]),
        "action": (policy, actions),
        "action_between": (between, actions),
        "action_towards": (towards, actions),
        "action_spread": (actions.mean(dim=0), actions),
    }
    expected = {name: ((a - b) ** 2).mean().item() for name, (a, b) in answers.items()}
    assert errors == pytest.approx(expected, rel=1e-4)


def test_a_horizon_of_one_step_can_be_measured() -> None:
    """The current step is the window's last: it has no next state, but everything else."""
    config = tiny_config(planner__horizon=1)
    errors = measure_model(constant_model(config), PLAIN, config, [counting()])
    assert errors["reward"] == pytest.approx(4)
    assert errors["return"] == pytest.approx(9)
    assert errors["action"] == pytest.approx(math.tanh(0.5) ** 2, rel=1e-5)


def test_batches_are_averaged_and_dropout_is_off() -> None:
    config = tiny_config(model__dropout=0.5)
    weights = tiny_weights(config)
    model, normaliser = weights.model(), weights.normaliser()
    parts = [
        measure_model(model, normaliser, config, [window_batch(3, seed=seed)]) for seed in range(3)
    ]
    model.train()
    errors = measure_model(
        model, normaliser, config, iter([window_batch(3, seed=seed) for seed in range(3)])
    )
    expected = {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}
    assert errors == pytest.approx(expected, rel=1e-5)


def test_measuring_leaves_the_weights_alone() -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    model = weights.model()
    measure_model(model, weights.normaliser(), config, [window_batch(3)])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights.tensors[f"model.{name}"])
        assert parameter.grad is None


# The critic


def linear(stack: EnsembleMLP, member: int, inputs: dict[int, float], add: float = 0.0) -> None:
    """Make one network a sum of its inputs by weight: x is relu(x) - relu(-x)."""
    for parameter in stack.parameters():
        parameter[member].zero_()
    first, middle, last = (stack.get_parameter(f"weight{n}")[member] for n in range(3))
    for number, (column, weight) in enumerate(inputs.items()):
        for unit, sign in ((2 * number, 1.0), (2 * number + 1, -1.0)):
            first[unit, column] = sign
            middle[unit, unit] = 1.0
            last[0, unit] = sign * weight
    stack.get_parameter("bias2")[member].fill_(add)


@torch.no_grad()
def known_critic() -> Critic:
    """V is the first state number, Q1 the first action number twice, Q2 three more than it."""
    critic = Critic(CriticConfig(width=4), 2, 1)
    linear(critic.v, 0, {0: 1.0})
    linear(critic.q, 0, {2: 2.0})
    linear(critic.q, 1, {2: 2.0}, add=3.0)
    return critic


def steps(
    first: list[float], actions: list[float], returns: list[float]
) -> TransitionBatch[NDArray[Any]]:
    column = np.asarray(first, np.float32)
    return TransitionBatch(
        states=np.stack([column, 100 * np.sin(column)], axis=1),
        actions=np.asarray(actions, np.float32)[:, None],
        rewards=0 * column,
        next_states=np.zeros((len(column), 2), np.float32),
        terminals=0 * column,
        returns=np.asarray(returns, np.float32),
    )


FIRST, TAKEN, SEEN = [-1.0, 0.0, 1.0, 4.0], [0.5, 0.5, -0.5, -0.5], [2.0, 4.0, 6.0, 12.0]


def test_means_and_correlations_of_the_critic_by_hand() -> None:
    """Off their means: V -2 -1 0 3, returns -4 -2 0 6, twice as much; Q 1 1 -1 -1."""
    measured = measure_critic(known_critic(), [steps(FIRST, TAKEN, SEEN)])
    covariance = (-4 - 2 - 0 - 6) / 4
    expected = {
        "v_mean": 1.0,
        "q_mean": 0.0,  # the lower twin: 1, 1, -1, -1
        "seen_mean": 6.0,
        "v_correlation": 1.0,
        "q_correlation": covariance / math.sqrt((16 + 4 + 0 + 36) / 4),
    }
    assert measured == pytest.approx(expected, abs=1e-6)


def test_correlations_are_taken_over_all_batches_together() -> None:
    """Within either half they would be 1 and undefined."""
    parts = [steps(FIRST[k:n], TAKEN[k:n], SEEN[k:n]) for k, n in ((0, 1), (1, 4))]
    together = measure_critic(known_critic(), [steps(FIRST, TAKEN, SEEN)])
    assert measure_critic(known_critic(), iter(parts)) == pytest.approx(together)


def test_a_value_opposed_to_the_return_has_correlation_minus_1() -> None:
    means = measure_critic(known_critic(), [steps(FIRST, TAKEN, [-x for x in SEEN])])
    assert means["v_correlation"] == pytest.approx(-1)
    assert means["seen_mean"] == pytest.approx(-6)


@pytest.mark.parametrize(
    "batch",
    [steps(FIRST, TAKEN, [3.0] * 4), steps([2.0] * 4, [0.5] * 4, SEEN)],
    ids=["returns", "values"],
)
def test_a_constant_has_correlation_0(batch: TransitionBatch[NDArray[Any]]) -> None:
    means = measure_critic(known_critic(), [batch])
    assert means["v_correlation"] == means["q_correlation"] == 0


def test_the_critic_is_given_raw_states() -> None:
    critic = known_critic()
    critic.state_mean.fill_(1.0)
    critic.state_std.fill_(2.0)
    means = measure_critic(critic, [steps(FIRST, TAKEN, SEEN)])
    assert means["v_mean"] == pytest.approx((1.0 - 1) / 2)
    assert means["q_mean"] == pytest.approx(0)
