"""What the trajectory model minimises: every term by hand on two steps, their sum, their slopes."""

import math

import pytest
import torch
from torch import Tensor

from learner.losses import TERMS, Losses, trajectory_losses
from m3pc.config.schema import EntropyConfig, LossConfig, LossWeightsConfig
from m3pc.model.btm import Prediction
from m3pc.model.masks import ACTIONS, Mask, token_mask
from m3pc.model.normalisation import Tokens
from m3pc.model.squashed_gaussian import log_density

# Of tanh(N(0.3, 0.5^2)): minus log density at 0.4, and of the draw with noise 0, tanh(0.3).
NLL, ENTROPY = 0.0820161, 0.1371098
MODES = {"dimension": 1, "joint": 2}  # numbers of an action that are summed
FIRST_VISIBLE, ALL_VISIBLE, NONE_VISIBLE = (
    token_mask(2, {ACTIONS: steps}) for steps in ([0], [0, 1], [])
)


def exact(numbers: object) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def truth() -> Tokens:
    """One row of two steps, two states and two actions; the second action is 0.4 twice."""
    return Tokens(
        states=exact([[[1, 2], [3, 4]]]),
        actions=exact([[[0.1, -0.2], [0.4, 0.4]]]),
        rewards=exact([[[5], [6]]]),
        returns=exact([[[7], [8]]]),
    )


def prediction() -> Prediction:
    """Off by 1, 2, 0, 0 in states, 3, 0 in rewards, 0, 4 in returns; N(0.3, 0.5) for action 2."""
    return Prediction(
        states=exact([[[2, 4], [3, 4]]]),
        rewards=exact([[[2], [6]]]),
        returns=exact([[[7], [12]]]),
        mu=exact([[[0.0, math.atanh(0.6)], [0.3, 0.3]]]),
        log_sigma=exact([[[0.0, 1.0], [math.log(0.5), math.log(0.5)]]]),
    )


def losses(
    mask: Mask,
    *,
    alpha: float = 0.0,
    noise: Tensor | None = None,
    predicted: Prediction | None = None,
    loss: LossConfig | None = None,
    per: str = "dimension",
) -> Losses:
    return trajectory_losses(
        predicted or prediction(),
        truth(),
        mask,
        torch.zeros(1, 2, 2, dtype=torch.float64) if noise is None else noise,
        alpha=alpha,
        loss=loss or LossConfig(actions_over="hidden", visible_action_mse=True),
        entropy=EntropyConfig.model_validate({"per": per}),
    )


@pytest.mark.parametrize(
    "mask", [FIRST_VISIBLE, ALL_VISIBLE, NONE_VISIBLE, token_mask(2, {0: [0], 2: [1]})]
)
def test_errors_are_means_over_all_tokens_visible_or_not(mask: Mask) -> None:
    terms = losses(mask)
    assert terms["states"].item() == pytest.approx((1 + 4 + 0 + 0) / 4)
    assert terms["rewards"].item() == pytest.approx((9 + 0) / 2)
    assert terms["returns"].item() == pytest.approx((0 + 16) / 2)


def test_errors_of_visible_actions_are_divided_by_all() -> None:
    """tanh(mu) is 0 and 0.6, the actions are 0.1 and -0.2."""
    assert losses(NONE_VISIBLE)["actions"].item() == 0
    assert losses(FIRST_VISIBLE)["actions"].item() == pytest.approx((0.01 + 0.64) / 4)
    second = 2 * (math.tanh(0.3) - 0.4) ** 2
    assert losses(ALL_VISIBLE)["actions"].item() == pytest.approx((0.01 + 0.64 + second) / 4)


@pytest.mark.parametrize(("per", "summed"), MODES.items())
def test_likelihood_and_entropy_are_of_hidden_actions(per: str, summed: int) -> None:
    terms = losses(FIRST_VISIBLE, per=per)
    assert terms["nll"].item() == pytest.approx(summed * NLL, abs=1e-6)
    assert terms["entropy"].item() == pytest.approx(summed * ENTROPY, abs=1e-6)
    assert terms["scored"].item() == 1


@pytest.mark.parametrize(("per", "summed"), MODES.items())
def test_likelihood_and_entropy_may_be_of_all_actions(per: str, summed: int) -> None:
    """The first action by hand: N(0, 1) at 0.1 and N(atanh 0.6, e^2) at -0.2; draws 0 and 0.6."""
    away = (math.atanh(-0.2) - math.atanh(0.6)) / math.e
    first = [
        0.5 * math.atanh(0.1) ** 2 + 0.9189385 + math.log(1 - 0.01),
        0.5 * away**2 + 1 + 0.9189385 + math.log(1 - 0.04),
    ]
    first_entropy = [0.9189385, 1 + 0.9189385 + math.log(1 - 0.36)]
    for mask in (FIRST_VISIBLE, ALL_VISIBLE, NONE_VISIBLE):
        terms = losses(mask, per=per, loss=LossConfig(actions_over="all"))
        assert terms["nll"].item() == pytest.approx(summed * (sum(first) + 2 * NLL) / 4, abs=1e-6)
        expected = summed * (sum(first_entropy) + 2 * ENTROPY) / 4
        assert terms["entropy"].item() == pytest.approx(expected, abs=1e-6)
        assert terms["scored"].item() == 1
    hidden = losses(NONE_VISIBLE, per=per)
    assert hidden["nll"].item() == pytest.approx(summed * (sum(first) + 2 * NLL) / 4, abs=1e-6)


def test_the_entropy_of_a_token_uses_its_own_noise() -> None:
    """The first number of the second token is drawn one sigma off its mean, the other at it."""
    noise = exact([[[9.0, 9.0], [1.0, 0.0]]])
    entropy = losses(FIRST_VISIBLE, noise=noise)["entropy"].item()
    farther = 0.5 + math.log(0.5) + 0.9189385 + math.log(1 - math.tanh(0.8) ** 2)
    assert entropy == pytest.approx((farther + ENTROPY) / 2, abs=1e-6)


def test_without_a_hidden_action_nothing_is_scored() -> None:
    terms = losses(ALL_VISIBLE, alpha=0.5)
    assert (terms["nll"].item(), terms["entropy"].item(), terms["scored"].item()) == (0, 0, 0)
    expected = terms["states"] + terms["rewards"] + terms["returns"] + terms["actions"]
    assert terms["total"].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("visible_action_mse", [False, True])
def test_the_total_is_the_sum_of_its_terms(alpha: float, visible_action_mse: bool) -> None:
    config = LossConfig(actions_over="hidden", visible_action_mse=visible_action_mse)
    total = losses(FIRST_VISIBLE, alpha=alpha, loss=config).total.item()
    squares = 1.25 + 4.5 + 8 + visible_action_mse * 0.65 / 4
    assert total == pytest.approx(squares + NLL - alpha * ENTROPY, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("states", 1.25),
        ("rewards", 4.5),
        ("returns", 8.0),
        ("actions", 0.65 / 4 + NLL - 0.3 * ENTROPY),
    ],
)
def test_each_loss_weight_scales_its_own_modality(name: str, expected: float) -> None:
    names = ("states", "actions", "rewards", "returns")
    weights = LossWeightsConfig.model_validate({n: 3.0 if n == name else 0.0 for n in names})
    config = LossConfig(weights=weights, actions_over="hidden", visible_action_mse=True)
    terms = losses(FIRST_VISIBLE, alpha=0.3, loss=config)
    assert terms["total"].item() == pytest.approx(3 * expected, abs=1e-6)
    assert terms["states"].item() == pytest.approx(1.25)  # what is reported has no weight


@pytest.mark.parametrize("per", MODES)
def test_repeating_a_row_does_not_change_the_loss(per: str) -> None:
    def thrice(x: Tensor) -> Tensor:
        return x.repeat(3, 1, 1)

    predicted = prediction()
    repeated = trajectory_losses(
        Prediction(**{name: thrice(getattr(predicted, name)) for name in predicted.__slots__}),
        Tokens(*map(thrice, truth())),
        FIRST_VISIBLE,
        torch.zeros(3, 2, 2, dtype=torch.float64),
        alpha=0.3,
        loss=LossConfig(actions_over="hidden", visible_action_mse=True),
        entropy=EntropyConfig.model_validate({"per": per}),
    )
    once = losses(FIRST_VISIBLE, alpha=0.3, per=per)
    assert repeated.terms.tolist() == pytest.approx(once.terms.tolist())


def test_reported_terms_are_one_tensor_in_the_order_of_their_names_without_a_graph() -> None:
    reported = losses(FIRST_VISIBLE)
    assert reported.terms.shape == (len(TERMS),) and not reported.terms.requires_grad
    numbers = dict(zip(TERMS, reported.terms.tolist(), strict=True))
    assert numbers["returns"] == pytest.approx(8)
    assert numbers["nll"] == pytest.approx(NLL, abs=1e-6)
    assert numbers["total"] == reported.total.item()


# Slopes


def slopes(mask: Mask, *, alpha: float = 0.0, loss: LossConfig | None = None) -> dict[str, Tensor]:
    """Gradient of the total by each prediction."""
    predicted = prediction()
    leaves = {name: getattr(predicted, name).requires_grad_() for name in predicted.__slots__}
    total = losses(mask, alpha=alpha, loss=loss, predicted=Prediction(**leaves)).total
    torch.autograd.backward(total)
    return {
        name: torch.zeros_like(x) if x.grad is None else x.grad[0] for name, x in leaves.items()
    }


def test_the_gradient_moves_mu_towards_the_action() -> None:
    """Visible: below 0.1 and above -0.2. Hidden: tanh(0.3) is below 0.4, by likelihood alone."""
    gradients = slopes(FIRST_VISIBLE)["mu"]
    assert gradients.sign().tolist() == [[-1, 1], [-1, -1]]
    # of the mean over two numbers: (mu - atanh(0.4)) / 0.5^2
    assert gradients[1, 0].item() == pytest.approx(0.5 * (0.3 - math.atanh(0.4)) / 0.25)
    # of the mean over four: 2 (tanh(mu) - a) (1 - tanh(mu)^2)
    assert gradients[0, 1].item() == pytest.approx(2 / 4 * 0.8 * (1 - 0.36))


def test_visible_actions_have_no_gradient_if_they_are_not_scored() -> None:
    config = LossConfig(actions_over="hidden", visible_action_mse=False)
    gradients = slopes(FIRST_VISIBLE, loss=config, alpha=0.3)
    assert gradients["mu"][0].tolist() == [0, 0]
    assert gradients["log_sigma"][0].tolist() == [0, 0]
    assert gradients["mu"][1].all() and gradients["log_sigma"][1].all()


def test_alpha_rewards_a_larger_sigma() -> None:
    """By log sigma: 1 - ((u - mu) / sigma)^2 of the likelihood, 1 of the entropy at noise 0."""
    away = (math.atanh(0.4) - 0.3) / 0.5
    for alpha in (0.0, 0.5, 2.0):
        gradients = slopes(FIRST_VISIBLE, alpha=alpha)["log_sigma"][1]
        assert gradients.tolist() == pytest.approx([0.5 * (1 - away**2 - alpha)] * 2)


def test_the_gradient_reduces_squared_errors() -> None:
    gradients = slopes(FIRST_VISIBLE)
    assert gradients["states"].tolist() == [[2 * 1 / 4, 2 * 2 / 4], [0, 0]]
    assert gradients["rewards"].flatten().tolist() == [2 * -3 / 2, 0]
    assert gradients["returns"].flatten().tolist() == [0, 2 * 4 / 2]


# The estimate of the entropy


@pytest.mark.parametrize(("mu", "sigma"), [(0.3, 0.5), (-1.0, 1.5), (0.0, 0.05)])
def test_the_entropy_is_estimated_without_bias(mu: float, sigma: float) -> None:
    count = 100_000
    shape = (count, 1, 1)
    filled = {name: torch.zeros(shape) for name in ("states", "rewards", "returns")}
    predicted = Prediction(
        **filled, mu=torch.full(shape, mu), log_sigma=torch.full(shape, math.log(sigma))
    )
    estimate = trajectory_losses(
        predicted,
        Tokens(**filled, actions=torch.zeros(shape)),
        token_mask(1, {}),
        torch.randn(shape, generator=torch.Generator().manual_seed(0)),
        alpha=0.0,
        loss=LossConfig(),
        entropy=EntropyConfig(),
    )["entropy"].item()
    actions = torch.linspace(-15, 15, 100_001, dtype=torch.float64).tanh()
    log_densities = log_density(actions, exact(mu), exact(sigma).log())
    numeric = -torch.trapezoid(log_densities.exp() * log_densities, actions).item()
    # A draw's log density varies by 0.7 to 2: a standard error of at most 0.007.
    assert estimate == pytest.approx(numeric, abs=0.02)
