"""Actions as the tanh of independent Gaussians, one per dimension. A action."""

import math

import torch
from torch import Tensor
from torch.nn import functional

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def bounded_log_sigma(raw: Tensor, low: float, high: float) -> Tensor:
    """A head's output mapped smoothly into [low, high]."""
    return low + 0.5 * (high - low) * (raw.tanh() + 1)


def draw(mu: Tensor, log_sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(mu + sigma * noise) and the log density of each of its numbers. All [..., A]."""
    u = mu + log_sigma.exp() * noise
    log_densities = -0.5 * noise.square() - log_sigma - HALF_LOG_TAU - _log_slope(u)
    return u.tanh(), log_densities


def log_density(actions: Tensor, mu: Tensor, log_sigma: Tensor) -> Tensor:
    """Log density of each number of actions strictly inside (-1, 1). All [..., A]."""
    u = torch.atanh(actions)
    standard = (u - mu) * (-log_sigma).exp()
    return -0.5 * standard.square() - log_sigma - HALF_LOG_TAU - _log_slope(u)


def _log_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), also where tanh(u) rounds to 1."""
    return 2 * (math.log(2) - u - functional.softplus(-2 * u))
