"""AdamW, its schedule, and its state under the names of parameters."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from m3pc.config.schema import OnlineConfig, OptimiserConfig, PretrainConfig
from m3pc.types import DivergedError, InputError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adamw(model: nn.Module, config: OptimiserConfig) -> AdamW:
    """Decay on the weights of linear maps only: not on biases, norms, modality and mask tokens."""
    decayed = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    chosen = {id(weight) for weight in decayed}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)


def learning_rate(config: PretrainConfig, update: int) -> float:
    """Up in a line over the warm-up, then down a cosine to 0 where the updates end."""
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    share = (update - config.warmup) / max(config.updates - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * share))


def online_rate(config: OnlineConfig, update: int) -> float:
    """In a line from `lr` to the part of it that is left after the updates that all steps owe."""
    owed = config.steps * config.updates_per_step
    done = min(update / owed, 1.0) if owed else 0.0
    return config.lr * (1 + done * (config.lr_end - 1))


def set_learning_rate(optimiser: Adam, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


def optimiser_state(optimiser: Adam, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`exp_avg.NAME` and so on; nothing before a parameter's first step, which it may never take:
    where no mask shows what it is for."""
    return {
        f"{moment}.{name}": optimiser.state[parameter][moment]
        for name, parameter in named.items()
        if parameter in optimiser.state
        for moment in MOMENTS
    }


def restore_optimiser(
    optimiser: Adam, named: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """What `optimiser_state` gave; the state of a new optimiser where it gave nothing."""
    optimiser.state.clear()
    for name, parameter in named.items():
        if not any(f"{moment}.{name}" in state for moment in MOMENTS):
            continue
        shapes = {"exp_avg": parameter, "exp_avg_sq": parameter, "step": torch.zeros(())}
        optimiser.state[parameter] = {
            moment: fitting(state, f"{moment}.{name}", like).to(parameter.device, copy=True)
            for moment, like in shapes.items()
        }


def fitting(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """A tensor of a saved state, which must be there, of the right kind, and finite."""
    found = state.get(name)
    if found is None:
        raise InputError(f"the state of training lacks {name}; use another checkpoint")
    if (found.shape, found.dtype) != (like.shape, like.dtype) or not found.isfinite().all():
        raise InputError(
            f"the state of training has {name} of {found.dtype} {list(found.shape)}, expected "
            f"finite {like.dtype} {list(like.shape)}; use another checkpoint"
        )
    return found


def require_finite(value: float, what: str, lower: str) -> None:
    if not math.isfinite(value):
        raise DivergedError(
            f"{what} is {value}: training diverged; start again with a lower {lower}"
        )


def clip(parameters: list[Tensor], largest: float) -> float:
    """Norm of the gradient before it was clipped to `largest`; 0 does not clip."""
    limit = largest or math.inf
    return float(torch.nn.utils.clip_grad_norm_(parameters, limit))
