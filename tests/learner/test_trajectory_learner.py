"""Updates of the trajectory model: schedule, decay, alpha, and the same bits from one state."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.optimiser import (
    adamw,
    clip_gradients,
    learning_rate,
    online_rate,
    optimiser_state,
    restore_optimiser,
)
from learner.trajectory import TrajectoryLearner, tokens
from m3pc.config.schema import Config, OnlineConfig, PretrainConfig
from m3pc.core.rng import MASKS, counter_stream
from m3pc.model.btm import TrajectoryModel
from m3pc.model.masks import draw_mask
from m3pc.model.normalisation import Tokens
from m3pc.types import DivergedError, WindowBatch
from tests.support.models.small_weights import (
    ACTIONS,
    STATES,
    tiny_config,
    tiny_weights,
    window_batch,
)

Batch = WindowBatch[NDArray[Any]]
T = 8
ONLY_DYNAMICS = {"masks__mixture__random": 0.0, "masks__mixture__policy": 0.0}  # all actions seen


def configured(preset: str = "small", **changes: object) -> Config:
    """By default one mask per batch, some dropout, no clipping."""
    plain = {"masks__groups": 1, "model__dropout": 0.1, "optimiser__clip": 0.0}
    return tiny_config(preset, **(plain | changes))


def tiny_learner(config: Config | None = None) -> TrajectoryLearner:
    """Starts from the same weights each time."""
    config = config or configured()
    weights = tiny_weights(config)
    return TrajectoryLearner(weights.model(), weights.normaliser(), config)


def parameters(learner: TrajectoryLearner) -> dict[str, Tensor]:
    """Copies of everything that learning changes."""
    tensors = learner.model.state_dict() | learner.state()
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The learning rate


def schedule(**changes: int) -> Callable[[int], float]:
    config = PretrainConfig(**({"updates": 100, "warmup": 10} | changes), lr=1e-3)
    return lambda update: learning_rate(config, update)


def test_the_learning_rate_has_a_linear_warm_up_and_a_cosine_decay() -> None:
    rate = schedule()
    assert rate(0) == pytest.approx(1e-4)
    assert rate(4) == pytest.approx(5e-4)
    assert rate(9) == pytest.approx(1e-3)
    assert rate(10) == pytest.approx(1e-3)
    assert rate(10 + 30) == pytest.approx(0.75e-3)  # a third of the way: cos(60 degrees) is a half
    assert rate(10 + 45) == pytest.approx(0.5e-3)
    assert rate(10 + 60) == pytest.approx(0.25e-3)
    assert 0 < rate(99) < 1e-6
    assert rate(100) == pytest.approx(0, abs=1e-12)
    rates = [rate(update) for update in range(100)]
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


def test_the_online_learning_rate_falls_linearly_until_all_steps_are_collected() -> None:
    config = OnlineConfig(steps=1000, updates_per_step=0.1, lr=1e-3, lr_end=0.2)
    rates = [online_rate(config, update) for update in (0, 50, 100, 170)]
    assert rates == pytest.approx([1e-3, 6e-4, 2e-4, 2e-4])
    assert online_rate(OnlineConfig(lr=1e-3), 10**6) == 1e-3


def test_a_schedule_may_have_no_warm_up_or_only_a_warm_up() -> None:
    assert schedule(warmup=0)(0) == 1e-3
    assert schedule(warmup=0)(50) == pytest.approx(0.5e-3)
    assert schedule(warmup=100)(99) == pytest.approx(1e-3)


def test_an_update_uses_the_learning_rate_of_its_number() -> None:
    """Adam's first step is the rate times the sign of the slope; biases have no decay."""
    changes = {"pretrain__updates": 100, "pretrain__warmup": 10, "pretrain__lr": 1e-3}
    for number, rate in ((0, 1e-4), (4, 5e-4), (55, 5e-4)):
        learner = tiny_learner(configured("small", **changes))
        before = learner.model.encoder_norm.bias.detach().clone()
        learner.update(number, window_batch())
        moved = (learner.model.encoder_norm.bias - before).abs()
        assert moved.max().item() == pytest.approx(rate, rel=0.01)


# Weight decay


def test_decay_is_on_the_weights_of_linear_maps_only() -> None:
    layers = ("encoder.0", "encoder.1", "decoder.0")
    modalities = ("states", "actions", "rewards", "returns")
    expected = {
        *(f"embed.{name}.weight" for name in modalities),
        *(f"decoder_embed.{name}.weight" for name in modalities),
        *(f"{at}.{part}.weight" for at in layers for part in ("qkv", "out", "expand", "contract")),
        *(
            f"heads.{name}.{at}.weight"
            for name in ("states", "rewards", "returns")
            for at in (1, 3)
        ),
        "heads.actions.mu.weight",
        "heads.actions.log_sigma.weight",
    }
    config = configured(optimiser__weight_decay=0.25)
    model = TrajectoryModel(config.model, STATES, ACTIONS)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = adamw(model, config.optimiser).param_groups
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert {name for name, number in decay.items() if number} == expected
    assert set(decay.values()) == {0.0, 0.25}
    assert decay.keys() == set(names.values())
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_the_optimiser_is_adamw_as_configured() -> None:
    config = configured(optimiser__beta1=0.7, optimiser__beta2=0.9, optimiser__epsilon=1e-3)
    made = adamw(TrajectoryModel(config.model, STATES, ACTIONS), config.optimiser)
    assert isinstance(made, torch.optim.AdamW)
    for group in made.param_groups:
        assert (group["betas"], group["eps"]) == ((0.7, 0.9), 1e-3)


@pytest.mark.parametrize(("largest", "left"), [(0.0, 5.0), (10.0, 5.0), (0.5, 0.5)])
def test_gradients_are_clipped_by_their_common_norm(largest: float, left: float) -> None:
    numbers = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    for number, slope in zip(numbers, (3.0, -4.0), strict=True):
        number.grad = torch.tensor([slope])
    assert clip_gradients(list(numbers), largest) == pytest.approx(5)
    gradients = [number.grad.item() for number in numbers if number.grad is not None]
    assert gradients == pytest.approx([left * 3 / 5, left * -4 / 5], rel=1e-5)


# Alpha


@pytest.mark.parametrize(("target", "direction"), [(5.0, 1), (-100.0, -1)])
def test_alpha_rises_below_the_targeted_entropy_and_falls_above(
    target: float, direction: int
) -> None:
    """Adam's first steps have the size of its learning rate, in log alpha."""
    learner = tiny_learner(configured(entropy__target=target, entropy__alpha_lr=0.01))
    assert learner.alpha == pytest.approx(0.1)
    numbers = learner.update(0, window_batch())
    assert (target - numbers["entropy"]) * direction > 0
    assert learner.alpha == pytest.approx(0.1 * math.exp(0.01 * direction))
    assert numbers["alpha"] == learner.alpha
    learner.update(1, window_batch())
    assert learner.alpha == pytest.approx(0.1 * math.exp(0.02 * direction), rel=1e-3)


def test_alpha_does_not_change_if_every_action_is_visible() -> None:
    learner = tiny_learner(configured("small", **ONLY_DYNAMICS))
    numbers = learner.update(0, window_batch())
    assert learner.alpha == pytest.approx(0.1, rel=1e-15)
    assert math.isnan(numbers["nll"]) and math.isnan(numbers["entropy"])
    assert math.isfinite(numbers["total"])


def test_the_loss_uses_the_current_alpha() -> None:
    numbers = [
        tiny_learner(configured(entropy__alpha=alpha)).update(0, window_batch())
        for alpha in (0.1, 0.6)
    ]
    assert numbers[0]["entropy"] == numbers[1]["entropy"]
    expected = -(0.6 - 0.1) * numbers[0]["entropy"]
    assert numbers[1]["total"] - numbers[0]["total"] == pytest.approx(expected, abs=1e-5)


# What an update is a function of


def test_the_same_weights_batch_seed_and_number_give_the_same_bits() -> None:
    one, other = tiny_learner(), tiny_learner()
    for number in (5, 0, 6):
        left = one.update(number, window_batch(seed=number))
        torch.manual_seed(number + 1000)
        other.model.eval()
        assert other.update(number, window_batch(seed=number)) == left
        assert same_bits(parameters(one), parameters(other))


@pytest.mark.parametrize(
    ("seed", "number", "batch"),
    [(0, 1, window_batch()), (1, 0, window_batch()), (0, 0, window_batch(seed=1))],
)
def test_another_number_seed_or_batch_gives_another_loss(
    seed: int, number: int, batch: Batch
) -> None:
    """The loss before the step: the learning rate has no influence."""
    first = tiny_learner(configured(seed=0)).update(0, window_batch())
    numbers = tiny_learner(configured(seed=seed)).update(number, batch)
    for name in ("states", "rewards", "returns", "total"):
        assert numbers[name] != first[name]


def test_each_update_number_has_its_own_dropout() -> None:
    """All masks have one pattern and differ only in the current step; the rest is dropout."""
    configs = (configured("small", **ONLY_DYNAMICS, model__dropout=share) for share in (0.5, 0.0))
    batch = window_batch()
    loud, quiet = (
        {tiny_learner(config).update(number, batch)["states"] for number in range(12)}
        for config in configs
    )
    assert len(loud) == 12
    assert 1 < len(quiet) <= T


def test_an_update_leaves_the_global_generator_as_it_was() -> None:
    learner = tiny_learner()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    learner.update(0, window_batch())
    assert torch.rand(2).equal(expected)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_group_of_rows_has_its_own_mask(groups: int) -> None:
    config = configured(seed=5, masks__groups=groups, model__dropout=0.0)
    learner, batch = tiny_learner(config), window_batch(8)
    model, normaliser = tiny_weights(config).model(), tiny_weights(config).normaliser()
    rng = counter_stream(config.seed, 3, MASKS)
    expected = []
    with torch.no_grad():
        all_rows = tokens(batch, normaliser, config)
        for first in range(0, 8, 8 // groups):
            rows = Tokens(*(part[first : first + 8 // groups] for part in all_rows))
            predicted = model(rows, draw_mask(config.masks, T, rng)).states
            assert predicted is not None
            expected.append((predicted - rows.states).square().mean().item())
    assert len({round(error, 5) for error in expected}) == groups
    assert learner.update(3, batch)["states"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_likelihood_is_a_mean_over_the_groups_that_scored_an_action() -> None:
    """Four groups of equal rows: those that see every action have no likelihood."""
    config = configured(
        "small",
        masks__groups=4,
        masks__mixture={"random": 0.0, "policy": 1.0, "dynamics": 1.0},
        model__dropout=0.0,
        pretrain__batch=4,
    )
    rng = counter_stream(config.seed, 0, MASKS)
    masks = [draw_mask(config.masks, T, rng) for _ in range(4)]
    hiding = [mask for mask in masks if not mask[1].all()]
    assert 0 < len(hiding) < 4
    weights, batch = tiny_weights(config), window_batch(1)
    many = batch.map(lambda x: np.repeat(x, 4, axis=0))
    alone = []
    for mask in hiding:
        with torch.no_grad():
            row = tokens(batch, weights.normaliser(), config)
            prediction = weights.model()(row, mask)
            assert prediction.mu is not None and prediction.log_sigma is not None
            hidden = torch.tensor(~mask[1])
            u = torch.atanh(row.actions[:, hidden])
            normal = (
                -0.5 * ((u - prediction.mu[:, hidden]) / prediction.log_sigma[:, hidden].exp()) ** 2
            )
            normal = normal - prediction.log_sigma[:, hidden] - 0.5 * math.log(2 * math.pi)
            slope = (1 - row.actions[:, hidden] ** 2).log()
            alone.append(-(normal - slope).mean().item())
    numbers = tiny_learner(config).update(0, many)
    assert numbers["nll"] == pytest.approx(np.mean(alone), rel=1e-4)


# Batches


def test_tokens_are_normalised_and_actions_clamped() -> None:
    config = configured(dataset__action_margin=0.01)
    normaliser, batch = tiny_weights(config).normaliser(), window_batch()
    batch.actions[0, 0] = (1, -1)
    encoded = tokens(batch, normaliser, config)
    assert encoded.actions[0, 0].tolist() == pytest.approx([0.99, -0.99])
    inside = np.abs(batch.actions) < 0.99
    np.testing.assert_array_equal(encoded.actions.numpy()[inside], batch.actions[inside])
    for name, scale in (
        ("states", normaliser.states),
        ("rewards", normaliser.rewards),
        ("returns", normaliser.returns),
    ):
        raw = getattr(batch, name)
        raw = raw if raw.ndim == 3 else raw[..., None]
        expected = (raw - scale.mean.numpy()) / scale.std.numpy()
        np.testing.assert_allclose(getattr(encoded, name).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["states", "actions", "rewards", "returns"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_batch_that_is_not_finite_changes_nothing(name: str, number: float) -> None:
    if name == "actions" and number == math.inf:
        number = -math.nan  # an infinite action is clipped into range
    learner = tiny_learner()
    learner.update(0, window_batch())
    before, batch = parameters(learner), window_batch()
    getattr(batch, name)[3, 2] = number
    with pytest.raises(DivergedError, match="update 1 is"):
        learner.update(1, batch)
    assert same_bits(parameters(learner), before)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    learner = tiny_learner()
    learner.update(0, window_batch())
    before = parameters(learner)
    parameter = next(iter(learner.model.parameters()))
    parameter.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
    with pytest.raises(DivergedError, match="gradient of update 1 is"):
        learner.update(1, window_batch())
    assert same_bits(parameters(learner), before)


# Checkpoints


def test_moments_are_restored_to_the_device_of_the_parameters() -> None:
    """A checkpoint is read on the CPU, the parameters may be elsewhere."""
    model = torch.nn.Linear(2, 1)
    optimiser = adamw(model, Config().optimiser)
    model(torch.ones(1, 2)).backward()
    optimiser.step()
    state = optimiser_state(optimiser, dict(model.named_parameters()))
    away = torch.nn.Linear(2, 1, device="meta")
    other = adamw(away, Config().optimiser)
    restore_optimiser(other, dict(away.named_parameters()), state)
    devices = {moment.device.type for row in other.state.values() for moment in row.values()}
    assert devices == {"meta"}


def test_a_restored_learner_continues_with_the_same_bits() -> None:
    config = configured(masks__groups=2)
    learner = tiny_learner(config)
    for number in range(3):
        learner.update(number, window_batch(seed=number))
    saved = {name: x.clone() for name, x in learner.state().items()}
    kept = {name: x.clone() for name, x in saved.items()}
    other = tiny_learner(config)
    other.model.load_state_dict(learner.model.state_dict())
    other.restore(saved)
    assert same_bits(parameters(other), parameters(learner))
    for number in range(3, 6):
        left = learner.update(number, window_batch(seed=number))
        assert other.update(number, window_batch(seed=number)) == left
        assert same_bits(parameters(other), parameters(learner))
        assert other.alpha == learner.alpha
    assert same_bits(saved, kept)  # and what was restored can be restored again


def test_without_the_optimisers_moments_the_next_update_differs() -> None:
    learner, other = tiny_learner(), tiny_learner()
    learner.update(0, window_batch())
    other.model.load_state_dict(learner.model.state_dict())
    other.restore({"log_alpha": learner.state()["log_alpha"]})
    for each in (learner, other):
        each.update(1, window_batch(seed=1))
    assert not torch.equal(learner.model.mask_tokens, other.model.mask_tokens)


def test_before_the_first_update_there_is_only_alpha_to_save() -> None:
    learner = tiny_learner()
    assert set(learner.state()) == {"log_alpha"}
    other = tiny_learner(configured(entropy__alpha=0.5))
    other.restore(learner.state())
    assert other.alpha == pytest.approx(0.1)


# Learning


@pytest.mark.parametrize("preset", ["small", "paper"])
def test_the_loss_of_a_batch_falls(preset: str) -> None:
    schedule = {"pretrain__updates": 60, "pretrain__warmup": 5, "pretrain__lr": 0.01}
    learner, batch = (
        tiny_learner(configured(preset, **schedule, model__dropout=0.0)),
        window_batch(),
    )
    rows = [learner.update(number, batch) for number in range(60)]
    for name in ("states", "rewards", "returns", "total"):
        early, late = (np.mean([row[name] for row in part]) for part in (rows[:10], rows[-10:]))
        assert late < 0.9 * early, name
    assert all(row["gradient"] > 0 for row in rows)
