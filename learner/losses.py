"""Losses of the trajectory model. B rows, T steps, A numbers of an action."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m3pc.config.schema import EntropyConfig, LossConfig
from m3pc.model import squashed_gaussian
from m3pc.model.btm import Prediction
from m3pc.model.masks import ACTIONS, Mask
from m3pc.model.normalisation import Tokens

# `actions` is the squared error of visible actions. `scored` is 1 if likelihood and entropy had an
# action to score, else 0; then `nll` and `entropy` are 0 too.
TERMS: Final = ("states", "actions", "rewards", "returns", "nll", "entropy", "scored", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The loss to minimise, and its terms for reports: one tensor, read in one device transfer."""

    total: Tensor  # differentiable
    terms: Tensor  # [len(TERMS)], detached

    def __getitem__(self, name: str) -> Tensor:
        """One term by its name in TERMS."""
        return self.terms[TERMS.index(name)]


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
    """Squared errors of all tokens, visible or not; likelihood and entropy of actions; the total.

    `noise` [B, T, A] is standard normal: the entropy is estimated with one sample per token.
    """
    states = (prediction.states - tokens.states).square().mean()
    rewards = (prediction.rewards - tokens.rewards).square().mean()
    returns = (prediction.returns - tokens.returns).square().mean()
    # Steps are chosen on the CPU, where the mask is: nothing here waits for the device.
    visible = mask[ACTIONS]
    visible_error = (prediction.mu.tanh() - tokens.actions).square()[:, _steps(visible, tokens)]
    visible_error = visible_error.sum() / tokens.actions.numel()
    scored = np.ones_like(visible) if loss.actions_over == "all" else ~visible
    if scored.any():
        steps = _steps(scored, tokens)
        nll, entropy_estimate = _likelihood(prediction, tokens.actions, noise, steps, entropy)
    else:
        nll = entropy_estimate = tokens.actions.new_zeros(())
    action_loss = nll - alpha * entropy_estimate
    if loss.visible_action_mse:
        action_loss = action_loss + visible_error
    weights = loss.weights
    total = weights.actions * action_loss
    total = total + weights.states * states
    total = total + weights.rewards * rewards
    total = total + weights.returns * returns
    any_scored = total.new_full((), float(scored.any()))
    terms = (states, visible_error, rewards, returns, nll, entropy_estimate, any_scored, total)
    return Losses(total=total, terms=torch.stack([term.detach() for term in terms]))


def _likelihood(
    prediction: Prediction, actions: Tensor, noise: Tensor, steps: Tensor, config: EntropyConfig
) -> tuple[Tensor, Tensor]:
    """Mean negative log likelihood and entropy at some steps, per dimension or summed over A."""
    mu, log_sigma = prediction.mu[:, steps], prediction.log_sigma[:, steps]
    nll = -squashed_gaussian.log_density(actions[:, steps], mu, log_sigma)
    entropy = -squashed_gaussian.draw(mu, log_sigma, noise[:, steps])[1]
    if config.per == "joint":
        nll, entropy = nll.sum(dim=-1), entropy.sum(dim=-1)
    return nll.mean(), entropy.mean()


def _steps(chosen: NDArray[np.bool_], tokens: Tokens) -> Tensor:
    return torch.from_numpy(np.flatnonzero(chosen)).to(tokens.actions.device)
