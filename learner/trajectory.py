"""Updates of the trajectory model and of its entropy's multiplier alpha."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.losses import TERMS, Losses, trajectory_losses
from learner.optimiser import (
    LearningRate,
    adamw,
    checked_tensor,
    clip_gradients,
    learning_rate,
    optimiser_state,
    require_finite,
    restore_optimiser,
)
from learner.process_group import ProcessGroup
from m3pc.config.schema import Config
from m3pc.core.rng import MASKS, NOISE, counter_stream
from m3pc.model.btm import TrajectoryModel
from m3pc.model.device import autocast
from m3pc.model.masks import ACTIONS, draw_mask
from m3pc.model.normalisation import Normaliser, Tokens
from m3pc.types import WindowBatch


class TrajectoryLearner:
    """Update k is a function of the weights, `state()`, the k-th batch and (seed, k) only."""

    def __init__(
        self,
        model: TrajectoryModel,
        normaliser: Normaliser,
        config: Config,
        *,
        rate: LearningRate | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """Without `rate`, the learning rate is that of pretraining."""
        self.model, self.config, self._normaliser = model, config, normaliser
        self._rate = rate or LearningRate("pretrain.lr", partial(learning_rate, config.pretrain))
        self._group = group or ProcessGroup()
        # log_alpha stays on the CPU: not every device has double precision.
        start = torch.tensor(math.log(config.entropy.alpha), dtype=torch.float64)
        self.log_alpha = start.requires_grad_()
        self._named = dict(model.named_parameters())
        self._adamw = adamw(model, config.optimiser)
        self._alpha_adam = torch.optim.Adam([self.log_alpha], config.entropy.alpha_lr)

    def update(self, number: int, batch: WindowBatch[NDArray[Any]]) -> dict[str, float]:
        """Take one step of the model, and one of alpha towards the target entropy.

        A loss or gradient that is not finite raises DivergedError and changes no weight.
        """
        config, parameters = self.config, list(self._named.values())
        self.model.train()
        with self._seeded(number), autocast(config.compute):
            losses = self._losses(number, tokens(batch, self._normaliser, config))
        self._adamw.zero_grad()
        torch.autograd.backward(torch.stack([group.total for group in losses]).mean())
        self._group.average([x.grad for x in parameters if x.grad is not None])
        norm = clip_gradients(parameters, config.optimiser.clip)
        # The only wait for the device: loss and gradient must be finite before the step.
        rows, gradient = torch.stack([group.terms for group in losses]).tolist(), norm.item()
        means = _mean([dict(zip(TERMS, row, strict=True)) for row in rows])
        numbers = self._group.all_reduce(means)  # all learners go on, or none
        require_finite(numbers["total"], f"the loss of update {number}", self._rate.setting)
        require_finite(gradient, f"the gradient of update {number}", self._rate.setting)
        for parameter_group in self._adamw.param_groups:
            parameter_group["lr"] = self._rate.at(number)
        self._adamw.step()
        if numbers.pop("scored"):
            self._step_alpha(numbers["entropy"])
        return numbers | {"alpha": self.alpha, "gradient": gradient}

    @property
    def alpha(self) -> float:
        """The weight of the entropy in the loss, per nat."""
        return math.exp(self.log_alpha.item())

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Seed torch's global generator for one update; noise and dropout draw from it."""
        device = torch.device(self.config.compute.device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(counter_stream(self.config.seed, number, NOISE).integers(2**62)))
            yield

    def _losses(self, number: int, batch: Tokens) -> list[Losses]:
        """Draw a mask for each group of rows and compute the group's losses."""
        config, losses = self.config, []
        rng = counter_stream(config.seed, number, MASKS)
        for group in zip(*(part.tensor_split(config.masks.groups) for part in batch), strict=True):
            mask = draw_mask(config.masks, config.model.window, rng)
            noise = self._group.shard(torch.randn_like(group[ACTIONS]))
            rows = Tokens(*map(self._group.shard, group))
            with self._group.per_rank_rng():  # dropout
                prediction = self.model(rows, mask)
            losses.append(
                trajectory_losses(
                    prediction,
                    rows,
                    mask,
                    noise,
                    alpha=self.alpha,
                    loss=config.loss,
                    entropy=config.entropy,
                )
            )
        return losses

    def _step_alpha(self, entropy: float) -> None:
        """One Adam step on log alpha that lowers alpha * (entropy - target)."""
        slope = self.alpha * (entropy - self.config.entropy.target)
        self.log_alpha.grad = torch.full_like(self.log_alpha, slope)
        self._alpha_adam.step()

    def state(self) -> dict[str, Tensor]:
        """log_alpha and the moments of both optimisers."""
        return {
            "log_alpha": self.log_alpha.detach(),
            **optimiser_state(self._adamw, self._named),
            **optimiser_state(self._alpha_adam, {"log_alpha": self.log_alpha}),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        with torch.no_grad():
            self.log_alpha.copy_(checked_tensor(state, "log_alpha", self.log_alpha))
        restore_optimiser(self._adamw, self._named, state)
        restore_optimiser(self._alpha_adam, {"log_alpha": self.log_alpha}, state)


def tokens(batch: WindowBatch[NDArray[Any]], normaliser: Normaliser, config: Config) -> Tokens:
    """Windows in the model's space, on its device; actions clamped to where atanh is finite."""
    on_device = batch.map(lambda x: torch.as_tensor(x).to(normaliser.states.mean.device))
    limit = 1 - config.dataset.action_margin
    return Tokens(
        states=normaliser.states.encode(on_device.states),
        actions=on_device.actions.clamp(-limit, limit),
        rewards=normaliser.rewards.encode(on_device.rewards[..., None]),
        returns=normaliser.returns.encode(on_device.returns[..., None]),
    )


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Average over groups; likelihood and entropy only over groups that scored an action."""
    scored = sum(row["scored"] for row in rows)
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    for name in ("nll", "entropy"):
        means[name] = sum(row[name] for row in rows) / scored if scored else math.nan
    return means | {"scored": scored}
