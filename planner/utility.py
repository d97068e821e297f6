"""The utility of an imagined plan, and its weight among others. N plans of h steps a decision."""

from dataclasses import dataclass

import torch
from torch import Tensor


def lambda_return(
    rewards: Tensor, values: Tensor, *, discount: float, lam: float, start: int = 0
) -> Tensor:
    """Blend all n-step returns of an imagined rollout: [..., h] twice -> [...].

    n steps of reward and then the value, for n = 0 .. h - 1, weigh (1 - lam) lam^n, and the last
    one all that is left. The last reward is not used: its step's value stands for it. `start` is
    the power of the discount on the first term.
    """
    score = values[..., -1]
    for n in reversed(range(values.shape[-1] - 1)):
        score = (1 - lam) * values[..., n] + lam * (rewards[..., n] + discount * score)
    return score * discount**start


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWeights:
    weights: Tensor  # [E, N], each row sums to 1
    effective_candidates: Tensor  # [E] effective sample size, 1 / sum of squared weights
    utility_std: Tensor  # [E] standard deviation of the utilities


def softmax_weights(
    utilities: Tensor, *, inverse_temperature: float, standardised: bool
) -> PlanWeights:
    """Softmax of utilities [E, N], in units of their standard deviation if `standardised`."""
    std = utilities.std(dim=-1, unbiased=False)
    below_best = utilities - utilities.amax(dim=-1, keepdim=True)  # exp of these cannot overflow
    if standardised:
        below_best = below_best / torch.where(std > 0, std, 1.0)[:, None]
    weights = torch.softmax(inverse_temperature * below_best, dim=-1)
    return PlanWeights(
        weights=weights, effective_candidates=1 / weights.square().sum(dim=-1), utility_std=std
    )
