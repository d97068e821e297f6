"""AdamW, learning rates, and the state of an optimiser under the names of its parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from m3pc.config.schema import OnlineConfig, OptimiserConfig, PretrainConfig
from m3pc.types import DivergedError, InputError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A learning rate by update, and the setting that error messages advise to lower."""

    setting: str
    at: Callable[[int], float]


def adamw(model: nn.Module, config: OptimiserConfig) -> AdamW:
    """Decay the weights of linear maps only: not biases, norms, modality and mask tokens."""
    decayed = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    decayed_ids = {id(weight) for weight in decayed}
    others = [p for p in model.parameters() if id(p) not in decayed_ids]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)


def learning_rate(config: PretrainConfig, update: int) -> float:
    """The rate of pretraining: linear warm-up, then a cosine down to 0 at the last update."""
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    share = (update - config.warmup) / max(config.updates - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * share))


def online_rate(config: OnlineConfig, update: int) -> float:
    """The rate of finetuning: linear from `lr` to `lr * lr_end` over the updates owed in all."""
    owed = config.steps * config.updates_per_step
    done = min(update / owed, 1.0) if owed else 0.0
    return config.lr * (1 + done * (config.lr_end - 1))


def optimiser_state(optimiser: Adam, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moments as `exp_avg.NAME` and so on. A parameter that no mask has used yet has none."""
    return {
        f"{moment}.{name}": optimiser.state[parameter][moment]
        for name, parameter in named.items()
        if parameter in optimiser.state
        for moment in MOMENTS
    }


def restore_optimiser(
    optimiser: Adam, named: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Set the moments that `optimiser_state` returned; parameters without moments start anew."""
    optimiser.state.clear()
    for name, parameter in named.items():
        if not any(f"{moment}.{name}" in state for moment in MOMENTS):
            continue
        shapes = {"exp_avg": parameter, "exp_avg_sq": parameter, "step": torch.zeros(())}
        optimiser.state[parameter] = {
            moment: checked_tensor(state, f"{moment}.{name}", like).to(parameter.device, copy=True)
            for moment, like in shapes.items()
        }


def checked_tensor(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """A tensor of a saved state; InputError if missing, not finite, or of another shape or type."""
    tensor = state.get(name)
    if tensor is None:
        raise InputError(f"the state of training lacks {name}; use another checkpoint")
    if (tensor.shape, tensor.dtype) != (like.shape, like.dtype) or not tensor.isfinite().all():
        raise InputError(
            f"the state of training has {name} of {tensor.dtype} {list(tensor.shape)}, expected "
            f"finite {like.dtype} {list(like.shape)}; use another checkpoint"
        )
    return tensor


def require_finite(value: float, what: str, setting: str) -> None:
    """Raise DivergedError, naming the `setting` to lower, unless `what` has a finite value."""
    if not math.isfinite(value):
        raise DivergedError(
            f"{what} is {value}: training diverged; start again with a lower {setting}"
        )


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale gradients down to a common norm of `max_norm` (0: no limit); return the norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
