"""Actions as tanh of a Gaussian: densities by hand, by integration, and at their ends."""

import math

import pytest
import torch
from torch import Tensor

from m3pc.model.squashed_gaussian import bounded_log_sigma, draw, log_density

MARGIN = 1 - 1e-5  # the largest action that is trained on


def exact(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_log_density_has_the_known_value() -> None:
    density = log_density(exact(0.4), exact(0.3), exact(0.5).log())
    assert density.item() == pytest.approx(-0.0820161, abs=5e-8)


def test_a_draw_is_the_squashed_gaussian_at_its_noise() -> None:
    noise = (math.atanh(0.4) - 0.3) / 0.5
    actions, log_densities = draw(exact(0.3), exact(0.5).log(), exact(noise))
    assert actions.item() == pytest.approx(0.4)
    assert log_densities.item() == pytest.approx(-0.0820161, abs=5e-8)


@pytest.mark.parametrize(
    ("mu", "sigma"), [(0.0, 1.0), (0.3, 0.5), (-1.5, 0.1), (0.5, math.exp(2)), (3.0, 0.3)]
)
def test_the_density_integrates_to_1(mu: float, sigma: float) -> None:
    """Between tanh(-12) and tanh(12): beyond, float64 has few actions and a wide Gaussian some."""
    actions = torch.linspace(-12, 12, 100_001, dtype=torch.float64).tanh()  # dense near the ends
    densities = log_density(actions, exact(mu), exact(sigma).log()).exp()
    within = sum(math.erf((12 + side * mu) / sigma / math.sqrt(2)) for side in (1, -1)) / 2
    assert torch.trapezoid(densities, actions).item() == pytest.approx(within, abs=1e-5)


def test_the_density_of_a_draw_is_that_of_its_action() -> None:
    rng = torch.Generator().manual_seed(0)
    mu, noise = torch.randn(2, 500, 3, generator=rng, dtype=torch.float64)
    log_sigma = torch.empty_like(mu).uniform_(-5, 1, generator=rng)
    actions, log_densities = draw(mu, log_sigma, noise)
    torch.testing.assert_close(
        log_density(actions, mu, log_sigma), log_densities, rtol=1e-6, atol=1e-6
    )


def test_every_number_has_its_own_density() -> None:
    mu, log_sigma = exact(0.3, -2.0), exact(0.5, 1.0).log()
    both = log_density(exact(0.4, -0.9), mu, log_sigma)
    assert both.shape == (2,)
    assert both[0].item() == pytest.approx(-0.0820161, abs=5e-8)
    # atanh(0.9) = 1.4722195, so 0.5277805 sigmas above mu; log(1 - 0.81) = -1.6607312
    assert both[1].item() == pytest.approx(-0.5 * 0.5277805**2 - 0.9189385 + 1.6607312, abs=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("mu", "log_sigma"), [(0.0, 2.0), (0.0, -5.0), (30.0, -5.0), (-1e4, 2.0)])
def test_densities_and_slopes_are_finite_at_the_margin(
    mu: float, log_sigma: float, sign: int
) -> None:
    mean, log_std = torch.tensor([mu], requires_grad=True), torch.tensor([log_sigma])
    density = log_density(torch.tensor([sign * MARGIN]), mean, log_std.requires_grad_())
    torch.autograd.backward(density)
    assert mean.grad is not None and log_std.grad is not None
    for number in (density, mean.grad, log_std.grad):
        assert number.isfinite().all()


def test_at_the_margin_single_precision_is_near_double() -> None:
    """What is left of 1 - 1e-5 in float32 is off by 2e-8, a 500th of the distance to 1."""
    one = log_density(torch.tensor([MARGIN]), torch.zeros(1), torch.zeros(1))
    other = log_density(exact(MARGIN), exact(0), exact(0))
    assert one.item() == pytest.approx(other.item(), abs=0.02)


@pytest.mark.parametrize("mu", [30.0, -30.0])
def test_a_draw_that_rounds_to_1_has_a_finite_density(mu: float) -> None:
    actions, log_densities = draw(torch.tensor([mu]), torch.zeros(1), torch.zeros(1))
    assert actions.abs().item() == 1
    # 1 - tanh(u)^2 tends to 4 exp(-2 |u|)
    assert log_densities.item() == pytest.approx(-0.9189385 - math.log(4) + 60)


def test_draws_follow_mu_and_sigma_by_their_slope() -> None:
    """d tanh(mu + sigma n) is 1 - a^2 by mu, and sigma n times as much by log sigma."""
    mu, log_sigma = exact(0.3).requires_grad_(), exact(0.5).log().requires_grad_()
    actions, _ = draw(mu, log_sigma, exact(-0.8))
    torch.autograd.backward(actions)
    assert mu.grad is not None and log_sigma.grad is not None
    slope = 1 - math.tanh(-0.1) ** 2
    assert mu.grad.item() == pytest.approx(slope)
    assert log_sigma.grad.item() == pytest.approx(-0.4 * slope)


def test_log_sigma_is_bounded_smoothly() -> None:
    raw = exact(-50, -1, 0, 1, 50).requires_grad_()
    bounded = bounded_log_sigma(raw, -5, 2)
    # -5 + 3.5 (tanh(raw) + 1), tanh(1) = 0.7615942
    assert bounded.tolist() == pytest.approx([-5, -4.1655796, -1.5, 1.1655796, 2], abs=1e-7)
    torch.autograd.backward(bounded.sum())
    assert raw.grad is not None
    assert raw.grad[2].item() == pytest.approx(3.5)


@pytest.mark.parametrize(("low", "high"), [(-20.0, 10.0), (-1.0, 0.5)])
def test_the_bounds_of_log_sigma_are_reached_and_not_left(low: float, high: float) -> None:
    bounded = bounded_log_sigma(torch.linspace(-100, 100, 1_001), low, high)
    assert bounded[0].item() == low
    assert bounded[-1].item() == high
    assert (bounded.diff() >= 0).all()
