"""What the trajectory model minimises. B rows, T steps, A action."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from m3pc.config.schema import EntropyConfig, LossConfig
from m3pc.model import squashed_gaussian as actions
from m3pc.model.btm import Prediction
from m3pc.model.masks import ACTIONS, Mask
from m3pc.model.normalisation import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Scalars. `nll` and `entropy` are 0 and `scored` is 0 where no action is scored."""

    states: Tensor
    actions: Tensor  # squared error of visible actions
    rewards: Tensor
    returns: Tensor
    nll: Tensor
    entropy: Tensor
    scored: Tensor  # 1 where likelihood and entropy had an action to look at
    total: Tensor

    def as_floats(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name).item() for field in fields(self)}


def trajectory_losses(
    prediction: Prediction,
    tokens: Tokens,
    mask: Mask,
    noise: Tensor,
    *,
    alpha: float,
    loss: LossConfig,
    entropy: EntropyConfig,
) -> Losses:
    """Errors of everything, visible or not; likelihood and entropy of actions; their sum.

    `noise` [B, T, A] is standard normal: the entropy is estimated with one draw a token.
    """
    assert prediction.states is not None and prediction.rewards is not None
    assert prediction.returns is not None and prediction.mu is not None
    assert prediction.log_sigma is not None
    squared = {
        "states": (prediction.states - tokens.states).square().mean(),
        "rewards": (prediction.rewards - tokens.rewards).square().mean(),
        "returns": (prediction.returns - tokens.returns).square().mean(),
    }
    seen = torch.tensor(mask[ACTIONS], device=tokens.actions.device)
    visible_error = (prediction.mu.tanh() - tokens.actions).square()[:, seen].sum()
    visible_error = visible_error / tokens.actions.numel()
    scored = torch.ones_like(seen) if loss.actions_over == "all" else ~seen
    nll, spread = _likelihood(prediction, tokens.actions, noise, scored, entropy)
    action_terms = nll - alpha * spread
    if loss.visible_action_mse:
        action_terms = action_terms + visible_error
    weights = loss.weights
    total = weights.actions * action_terms
    for name, term in squared.items():
        total = total + getattr(weights, name) * term
    return Losses(
        **squared,
        actions=visible_error,
        nll=nll,
        entropy=spread,
        scored=scored.any().to(total.dtype),
        total=total,
    )


def _likelihood(
    prediction: Prediction, taken: Tensor, noise: Tensor, scored: Tensor, config: EntropyConfig
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood and entropy: means over scored tokens, per dimension or summed."""
    assert prediction.mu is not None and prediction.log_sigma is not None
    if not scored.any():
        return taken.new_zeros(()), taken.new_zeros(())
    mu, log_sigma = prediction.mu[:, scored], prediction.log_sigma[:, scored]
    nll = -actions.log_density(taken[:, scored], mu, log_sigma)
    entropy = -actions.draw(mu, log_sigma, noise[:, scored])[1]
    if config.per == "joint":
        nll, entropy = nll.sum(dim=-1), entropy.sum(dim=-1)
    return nll.mean(), entropy.mean()
