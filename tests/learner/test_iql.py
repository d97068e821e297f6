"""The critic's updates: by hand, against a plain implementation, on toys with known values."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.iql import CriticLearner, expectile_loss
from m3pc.config.presets import PRESETS
from m3pc.config.schema import CriticConfig
from m3pc.model.critic import Critic, EnsembleMLP
from m3pc.types import DivergedError, TransitionBatch

Batch = TransitionBatch[NDArray[Any]]
S, A = 3, 2


def config(**changes: Any) -> CriticConfig:
    return CriticConfig(**({"width": 8, "layers": 2, "discount": 0.9} | changes))


def transitions(rows: int = 16, *, seed: int = 0, dtype: str = "f4") -> Batch:
    """Random transitions, of which a third are terminal."""
    rng = np.random.default_rng(seed)
    batch: Batch = TransitionBatch(
        states=rng.normal(1, 2, (rows, S)),
        actions=rng.uniform(-1, 1, (rows, A)),
        rewards=rng.normal(size=rows),
        next_states=rng.normal(1, 2, (rows, S)),
        terminals=(rng.random(rows) < 1 / 3).astype(float),
        returns=rng.normal(size=rows),
    )
    return batch.map(lambda x: x.astype(dtype))


def random_critic(settings: CriticConfig, *, seed: int = 0) -> Critic:
    """Random weights in double precision, with which either Q function is sometimes the lower."""
    critic = Critic(settings, S, A).double()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.normal_(generator=rng)
    critic.state_mean.copy_(torch.tensor([1.0, -1.0, 0.5]))
    critic.state_std.copy_(torch.tensor([2.0, 0.5, 1.0]))
    return critic


def constant_critic(settings: CriticConfig, *, q: tuple[float, float], v: float) -> Critic:
    """The same Q1, Q2 and V everywhere."""
    critic = Critic(settings, S, A)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.zero_()
        for stack, numbers in ((critic.q, q), (critic.v, (v,))):
            last = stack.get_parameter(f"bias{settings.layers}")
            last.copy_(torch.tensor(numbers)[:, None])
    return critic


# Networks


def test_the_critic_has_as_many_parameters_as_the_authors_have() -> None:
    """Hopper: each Q function has 69,889 parameters and V has 69,121."""
    critic = Critic(PRESETS["parity"].critic, 11, 3)
    q, v = (sum(p.numel() for p in stack.parameters()) for stack in (critic.q, critic.v))
    assert (q, v) == (2 * 69_889, 69_121)


def layer(stack: EnsembleMLP, member: int, number: int) -> tuple[Tensor, Tensor]:
    weight, bias = (stack.get_parameter(f"{name}{number}")[member] for name in ("weight", "bias"))
    return weight.detach().clone(), bias.detach().clone()


def network(layers: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """One plain ReLU network: [B, inputs] -> [B]."""
    for number, (weight, bias) in enumerate(layers):
        x = x @ weight.T + bias
        x = x.clamp(min=0) if number < len(layers) - 1 else x
    return x[:, 0]


@torch.no_grad()
def test_members_of_an_ensemble_are_separate_networks() -> None:
    critic = random_critic(config())
    batch = transitions(dtype="f8").map(torch.from_numpy)
    states, actions = batch.states, batch.actions
    scaled = (states - torch.tensor([1.0, -1.0, 0.5])) / torch.tensor([2.0, 0.5, 1.0])
    pairs = torch.cat([scaled, actions], dim=1)
    q1, q2 = (network([layer(critic.q, m, n) for n in range(3)], pairs) for m in range(2))
    v = network([layer(critic.v, 0, n) for n in range(3)], scaled)
    torch.testing.assert_close(critic.q_values(states, actions), torch.stack([q1, q2]))
    torch.testing.assert_close(critic.min_q(states, actions), torch.minimum(q1, q2))
    torch.testing.assert_close(critic.value(states), v)
    assert (q1 < q2).any() and (q1 > q2).any()


# Losses


@pytest.mark.parametrize(
    ("expectile", "expected"),
    [
        (0.7, (0.7 * 4 + 0.3 * 1 + 0) / 3),
        (0.9, (0.9 * 4 + 0.1 * 1 + 0) / 3),
        (0.5, (4 + 1 + 0) / 6),
    ],
)
def test_the_expectile_loss_by_hand(expectile: float, expected: float) -> None:
    loss = expectile_loss(torch.tensor([2.0, -1.0, 0.0]), expectile)
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("expectile", [0.3, 0.5, 0.7, 0.9])
def test_of_0_and_1_the_expectile_is_itself(expectile: float) -> None:
    """expectile * (1 - m) = (1 - expectile) * m at m = expectile: there the loss is flat."""
    place = torch.tensor(expectile, requires_grad=True)
    torch.autograd.backward(expectile_loss(torch.tensor([0.0, 1.0]) - place, expectile))
    assert place.grad is not None
    assert place.grad.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("terminals", "heeded", "expected"),
    [
        pytest.param([1, 1], True, [1, 3], id="terminal"),
        pytest.param([0, 0], True, [1 + 9, 3 + 9], id="time-out or in between"),
        pytest.param([0, 1], True, [1 + 9, 3], id="one of each"),
        pytest.param([0, 1], False, [1 + 9, 3 + 9], id="terminals are ignored"),
    ],
)
def test_only_terminal_steps_have_no_future(
    terminals: list[float], heeded: bool, expected: list[float]
) -> None:
    """Q is 0 and V is 10 everywhere, rewards are 1 and 3, the discount 0.9."""
    settings = config(terminals=heeded)
    batch = replace(
        transitions(2),
        rewards=np.asarray([1, 3], np.float32),
        terminals=np.asarray(terminals, np.float32),
    )
    learner = CriticLearner(constant_critic(settings, q=(0, 0), v=10), settings)
    q_loss = learner.update(batch)["q_loss"]
    assert q_loss == pytest.approx(sum(goal**2 for goal in expected) / 2)


def test_q_loss_is_a_mean_over_both_q_functions() -> None:
    settings = config()
    batch = replace(transitions(2), rewards=np.zeros(2, np.float32))
    learner = CriticLearner(constant_critic(settings, q=(1, 3), v=0), settings)
    assert learner.update(batch)["q_loss"] == pytest.approx((1 + 9) / 2)


@pytest.mark.parametrize(("v", "expected"), [(1, 0.7 * 9), (5, 0.3 * 1)])
def test_v_is_compared_with_the_lower_target(v: float, expected: float) -> None:
    settings = config(expectile=0.7)
    learner = CriticLearner(constant_critic(settings, q=(6, 4), v=v), settings)
    assert learner.update(transitions())["value_loss"] == pytest.approx(expected, rel=1e-5)


# The update


class Plain:
    """V's step, then Q's, then the targets', each written out, with an Adam of its own."""

    def __init__(self, critic: Critic, settings: CriticConfig) -> None:
        numbers = range(settings.layers + 1)
        self.settings, self.scaled = settings, critic.normalise
        self.q = [[layer(critic.q, member, n) for n in numbers] for member in range(2)]
        self.v = [layer(critic.v, 0, n) for n in numbers]
        self.targets = [[(w.clone(), b.clone()) for w, b in twin] for twin in self.q]
        q_leaves = [x.requires_grad_() for twin in self.q for pair in twin for x in pair]
        v_leaves = [x.requires_grad_() for pair in self.v for x in pair]
        self.q_adam = torch.optim.Adam(q_leaves, lr=settings.lr)
        self.v_adam = torch.optim.Adam(v_leaves, lr=settings.lr)

    def update(self, batch: TransitionBatch[Tensor]) -> dict[str, float]:
        settings = self.settings
        states, next_states = self.scaled(batch.states), self.scaled(batch.next_states)
        pairs = torch.cat([states, batch.actions], dim=1)
        next_values = network(self.v, next_states).detach()

        slow = torch.minimum(*(network(twin, pairs) for twin in self.targets))
        error = slow - network(self.v, states)
        sides = (settings.expectile - (error < 0).double()).abs()
        value_loss = (sides * error**2).mean()
        self.v_adam.zero_grad()
        torch.autograd.backward(value_loss)
        self.v_adam.step()

        goals = batch.rewards + settings.discount * (1 - batch.terminals) * next_values
        q_loss = sum(((network(twin, pairs) - goals) ** 2).mean() / 2 for twin in self.q)
        assert isinstance(q_loss, Tensor)
        self.q_adam.zero_grad()
        torch.autograd.backward(q_loss)
        self.q_adam.step()

        keep, take = 1 - settings.tau, settings.tau
        self.targets = [
            [
                (keep * old_w + take * w.detach(), keep * old_b + take * b.detach())
                for (old_w, old_b), (w, b) in zip(old, new, strict=True)
            ]
            for old, new in zip(self.targets, self.q, strict=True)
        ]
        return {"value_loss": value_loss.item(), "q_loss": q_loss.item()}


@pytest.mark.parametrize(
    "changes", [{}, {"tau": 0.3, "lr": 0.02, "expectile": 0.9}, {"layers": 1, "discount": 0.5}]
)
def test_one_step_of_adam_is_the_step_of_v_and_then_that_of_q(changes: dict[str, Any]) -> None:
    settings = config(**({"lr": 0.01, "tau": 0.1} | changes))
    critic = random_critic(settings)
    plain, learner = Plain(critic, settings), CriticLearner(critic, settings)
    for seed in range(3):
        batch = transitions(seed=seed, dtype="f8")
        tensors = batch.map(torch.from_numpy)
        assert learner.update(batch) == pytest.approx(plain.update(tensors), rel=1e-6)
        pairs = torch.cat([critic.normalise(tensors.states), tensors.actions], dim=1)
        slow = torch.stack([network(twin, pairs) for twin in plain.targets])
        targets = learner.target_twins(tensors.states, tensors.actions)
        torch.testing.assert_close(targets, slow, rtol=0, atol=1e-6)
        for number in range(settings.layers + 1):
            expected = {**{m: plain.q[m][number] for m in (0, 1)}, 2: plain.v[number]}
            for member, pair in expected.items():
                stack, row = (critic.v, 0) if member == 2 else (critic.q, member)
                for one, other in zip(layer(stack, row, number), pair, strict=True):
                    torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tau", [0.005, 0.25, 1.0])
def test_targets_move_towards_the_q_functions_by_tau(tau: float) -> None:
    settings = config(tau=tau, lr=0.1)
    critic = random_critic(settings)
    learner = CriticLearner(critic, settings)
    old = [target.clone() for target in learner.targets]
    learner.update(transitions(dtype="f8"))
    for before, target, new in zip(old, learner.targets, critic.q.parameters(), strict=True):
        assert not torch.equal(before, new)
        torch.testing.assert_close(target, before + tau * (new.detach() - before))


def test_targets_are_copies_from_the_start() -> None:
    settings = config()
    critic = random_critic(settings)
    learner = CriticLearner(critic, settings)
    with torch.no_grad():
        for parameter in critic.q.parameters():
            parameter.add_(1)
    for target, new in zip(learner.targets, critic.q.parameters(), strict=True):
        torch.testing.assert_close(target, new.detach() - 1)
        assert not target.requires_grad


def loop(terminal: float) -> Batch:
    """One state, one action, reward 1, back to the same state."""
    one = np.ones((4, 1), np.float32)
    return TransitionBatch(
        states=np.tile(one, S),
        actions=np.tile(0 * one, A),
        rewards=one[:, 0],
        next_states=np.tile(one, S),
        terminals=terminal * one[:, 0],
        returns=0 * one[:, 0],
    )


@pytest.mark.parametrize(("terminal", "worth"), [(1.0, 1.0), (0.0, 2.0)])
def test_a_loop_has_the_value_of_its_discounted_rewards(terminal: float, worth: float) -> None:
    """Discount 1/2: 1 if it ends there, 1 + 1/2 + 1/4 + ... = 2 if it goes on."""
    torch.manual_seed(0)
    settings = config(discount=0.5, lr=0.02, tau=0.2)
    learner = CriticLearner(Critic(settings, S, A), settings)
    batch = loop(terminal)
    for _ in range(250):
        learner.update(batch)
    states, actions = torch.from_numpy(batch.states), torch.from_numpy(batch.actions)
    with torch.no_grad():
        for values in (learner.critic.value(states), *learner.critic.q_values(states, actions)):
            assert values.tolist() == pytest.approx([worth] * 4, abs=0.05)


# Regression


def test_regression_learns_the_observed_returns() -> None:
    """Two states, returns 3 and -1; the targets always equal the Q functions."""
    torch.manual_seed(0)
    settings = config(lr=0.02)
    critic = Critic(settings, S, A)
    critic.state_mean.fill_(5.0)
    learner = CriticLearner(critic, settings)
    states = 5 + np.repeat(np.eye(2, S, dtype=np.float32), 4, axis=0)
    returns = np.repeat(np.asarray([3, -1], np.float32), 4)
    batch = replace(transitions(8), states=states, returns=returns)
    first = learner.regress(batch)
    for _ in range(300):
        last = learner.regress(batch)
    assert last["value_loss"] < 1e-3 < first["value_loss"]
    assert last["q_loss"] < 1e-3 < first["q_loss"]
    with torch.no_grad():
        rows, actions = torch.from_numpy(states), torch.from_numpy(batch.actions)
        assert critic.value(rows).tolist() == pytest.approx(returns.tolist(), abs=0.1)
        for twin in critic.q_values(rows, actions):
            assert twin.tolist() == pytest.approx(returns.tolist(), abs=0.1)
    for target, new in zip(learner.targets, critic.q.parameters(), strict=True):
        assert torch.equal(target, new)


def test_regression_looks_at_returns_only() -> None:
    settings = config()
    learners = [CriticLearner(random_critic(settings), settings) for _ in range(2)]
    batch = transitions(dtype="f8")
    other = replace(
        batch, rewards=batch.rewards + 7, terminals=1 - batch.terminals, next_states=batch.states
    )
    assert learners[0].regress(batch) == learners[1].regress(other)
    assert learners[0].regress(replace(batch, returns=batch.returns + 1)) != learners[1].regress(
        batch
    )


def test_losses_of_a_regression_by_hand() -> None:
    settings = config()
    batch = replace(transitions(2), returns=np.asarray([1, 3], np.float32))
    learner = CriticLearner(constant_critic(settings, q=(0, 1), v=2), settings)
    losses = learner.regress(batch)
    assert losses["value_loss"] == pytest.approx((1 + 1) / 2)
    assert losses["q_loss"] == pytest.approx((1 + 9 + 0 + 4) / 4)


# Checkpoints


@pytest.mark.parametrize("name", ["update", "regress"])
def test_a_loss_that_is_not_finite_changes_nothing(name: str) -> None:
    learner = CriticLearner(Critic(config(), S, A), config())
    before = [x.detach().clone() for x in (*learner.critic.parameters(), *learner.targets)]
    batch = transitions()
    (batch.rewards if name == "update" else batch.returns)[2] = np.inf
    with pytest.raises(DivergedError, match="a lower critic"):
        getattr(learner, name)(batch)
    after = (*learner.critic.parameters(), *learner.targets)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    learner = CriticLearner(Critic(config(), S, A), config())
    learner.update(transitions())
    before = [x.detach().clone() for x in (*learner.critic.parameters(), *learner.targets)]
    parameter = next(iter(learner.critic.v.parameters()))
    parameter.register_hook(lambda gradient: gradient * np.inf)  # type: ignore[no-untyped-call]
    with pytest.raises(DivergedError, match="the critic's gradient is"):
        learner.update(transitions())
    after = (*learner.critic.parameters(), *learner.targets)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_restored_learner_continues_with_the_same_bits() -> None:
    settings = config(tau=0.1, lr=0.01)
    learner = CriticLearner(random_critic(settings), settings)
    learner.regress(transitions(dtype="f8"))
    for seed in range(3):
        learner.update(transitions(seed=seed, dtype="f8"))
    saved = {name: x.clone() for name, x in learner.state().items()}
    kept = {name: x.clone() for name, x in saved.items()}
    critic = random_critic(settings, seed=1)
    other = CriticLearner(critic, settings)
    critic.load_state_dict(learner.critic.state_dict())
    other.restore(saved)
    for seed in range(3, 6):
        batch = transitions(seed=seed, dtype="f8")
        assert other.update(batch) == learner.update(batch)
    one, two = (x.critic.state_dict() | x.state() for x in (learner, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(saved[name], kept[name]) for name in kept)  # can be restored again


def test_before_the_first_update_there_are_only_targets_to_save() -> None:
    settings = config()
    learner = CriticLearner(random_critic(settings), settings)
    names = {f"target.{part}{n}" for part in ("weight", "bias") for n in range(3)}
    assert set(learner.state()) == names
    other = CriticLearner(random_critic(settings, seed=1), settings)
    other.restore(learner.state())
    for one, two in zip(learner.targets, other.targets, strict=True):
        assert torch.equal(one, two)


def test_every_field_of_a_batch_changes_the_update() -> None:
    """Every field but the returns, which only a regression reads."""
    settings = config()
    batch = transitions(dtype="f8")

    def after(changed: Batch) -> dict[str, float]:
        return CriticLearner(random_critic(settings), settings).update(changed)

    before = after(batch)
    for field in fields(batch):
        number = getattr(batch, field.name)
        new = 1 - number if field.name == "terminals" else number + 1
        changed = replace(batch, **{field.name: new})
        assert (after(changed) == before) == (field.name == "returns"), field.name
