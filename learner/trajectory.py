"""Updates of the trajectory model and of its entropy's multiplier alpha."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.losses import Losses, trajectory_losses
from learner.optimiser import (
    adamw,
    clip,
    fitting,
    learning_rate,
    optimiser_state,
    require_finite,
    restore_optimiser,
    set_learning_rate,
)
from learner.process_group import ProcessGroup
from m3pc.config.schema import Config
from m3pc.core.rng import MASKS, NOISE, counter_stream
from m3pc.model.btm import TrajectoryModel
from m3pc.model.device import autocast
from m3pc.model.masks import ACTIONS, draw
from m3pc.model.normalisation import Normaliser, Tokens
from m3pc.types import WindowBatch

LearningRateFn = Callable[[int], float]


class TrajectoryLearner:
    """Update k is a function of the weights, the k-th batch and (seed, k): nothing else is kept."""

    def __init__(
        self,
        model: TrajectoryModel,
        normaliser: Normaliser,
        config: Config,
        *,
        rate: LearningRateFn | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """`rate` is the learning rate at each update; without it, that of pretraining."""
        self.model, self.config, self._normaliser = model, config, normaliser
        self._rate = rate or partial(learning_rate, config.pretrain)
        self._lower = "online.lr" if rate else "pretrain.lr"
        self._group = group or ProcessGroup()
        # One number in double precision, which not every device has: it stays here.
        start = torch.tensor(math.log(config.entropy.alpha), dtype=torch.float64)
        self.log_alpha = start.requires_grad_()
        self._named = dict(model.named_parameters())
        self._adamw = adamw(model, config.optimiser)
        self._alpha_adam = torch.optim.Adam([self.log_alpha], config.entropy.alpha_lr)

    def update(self, number: int, batch: WindowBatch[NDArray[Any]]) -> dict[str, float]:
        """One step down the loss, and one of alpha towards the entropy's bound."""
        config = self.config
        torch.manual_seed(int(counter_stream(config.seed, number, NOISE).integers(2**62)))
        self.model.train()
        with autocast(config.compute):
            parts = self._losses(number, tokens(batch, self._normaliser, config))
        total = torch.stack([part.total for part in parts]).mean()
        numbers = self._group.all_reduce(_mean([part.as_floats() for part in parts]))
        require_finite(numbers["total"], f"the loss of update {number}", self._lower)
        self._adamw.zero_grad()
        torch.autograd.backward(total)
        self._group.average([x.grad for x in self._named.values() if x.grad is not None])
        norm = clip(list(self._named.values()), config.optimiser.clip)
        require_finite(norm, f"the gradient of update {number}", self._lower)
        set_learning_rate(self._adamw, self._rate(number))
        self._adamw.step()
        if numbers.pop("scored"):
            self._step_alpha(numbers["entropy"])
        return numbers | {"alpha": self.alpha, "gradient": norm}

    @property
    def alpha(self) -> float:
        return math.exp(self.log_alpha.item())

    def _losses(self, number: int, whole: Tokens) -> list[Losses]:
        """Each group of rows under its own mask."""
        config = self.config
        rng = counter_stream(config.seed, number, MASKS)
        groups = config.masks.groups
        found = []
        for rows in zip(*(part.tensor_split(groups) for part in whole), strict=True):
            mask = draw(config.masks, config.model.window, rng)
            noise = self._group.shard(torch.randn_like(rows[ACTIONS]))
            part = Tokens(*map(self._group.shard, rows))
            with self._group.per_rank_rng():  # dropout
                prediction = self.model(part, mask)
            found.append(
                trajectory_losses(
                    prediction,
                    part,
                    mask,
                    noise,
                    alpha=self.alpha,
                    loss=config.loss,
                    entropy=config.entropy,
                )
            )
        return found

    def _step_alpha(self, entropy: float) -> None:
        """Down the gradient of alpha * (entropy - target) by log alpha."""
        slope = self.alpha * (entropy - self.config.entropy.target)
        self.log_alpha.grad = torch.full_like(self.log_alpha, slope)
        self._alpha_adam.step()

    def state(self) -> dict[str, Tensor]:
        """All that the next update needs beside the model's own weights."""
        alpha = optimiser_state(self._alpha_adam, {"log_alpha": self.log_alpha})
        return {"log_alpha": self.log_alpha.detach()} | {
            **optimiser_state(self._adamw, self._named),
            **alpha,
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.log_alpha.copy_(fitting(state, "log_alpha", self.log_alpha))
        restore_optimiser(self._adamw, self._named, state)
        restore_optimiser(self._alpha_adam, {"log_alpha": self.log_alpha}, state)


def tokens(batch: WindowBatch[NDArray[Any]], normaliser: Normaliser, config: Config) -> Tokens:
    """Pieces in the model's space, on its device; actions where atanh is finite."""
    on_device = batch.map(lambda x: torch.as_tensor(x).to(normaliser.states.mean.device))
    limit = 1 - config.dataset.action_margin
    return Tokens(
        states=normaliser.states.encode(on_device.states),
        actions=on_device.actions.clamp(-limit, limit),
        rewards=normaliser.rewards.encode(on_device.rewards[..., None]),
        returns=normaliser.returns.encode(on_device.returns[..., None]),
    )


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over groups; likelihood and entropy over those that scored an action."""
    scored = sum(row["scored"] for row in rows)
    found = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    for name in ("nll", "entropy"):
        found[name] = sum(row[name] for row in rows) / scored if scored else math.nan
    return found | {"scored": scored}
