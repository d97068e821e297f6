"""Small weights as inputs of the dense reference. S state, A action, h steps of a plan."""

import torch
from torch import Tensor

from benchmarks import reference
from m3pc.model.weights import Weights, with_prefix
from m3pc.types import Window
from planner.forward import Guidance, PlanningBatch
from tests.support.models.small_weights import MAX_EPISODE_STEPS


def planning_batch(window: Window, target_return: float = 0.0) -> PlanningBatch:
    """The rows of a window, which have the same `now`."""
    return PlanningBatch(
        states=torch.from_numpy(window.states),
        actions=torch.from_numpy(window.actions),
        now=int(window.now[0]),
        steps=torch.from_numpy(window.steps),
        target_returns=torch.full((len(window),), target_return),
        max_episode_steps=MAX_EPISODE_STEPS,
    )


def moments(weights: Weights) -> dict[str, tuple[Tensor, Tensor]]:
    tensors = with_prefix(weights.tensors, "normaliser.")
    names = ("states", "rewards", "returns")
    return {name: (tensors[f"{name}.mean"], tensors[f"{name}.std"]) for name in names}


def dense_proposal(
    weights: Weights, window: Window, row: int, target_return: float
) -> tuple[Tensor, Tensor]:
    """Mean and log sigma [h, A] of the policy."""
    scales, now = moments(weights), int(window.now[row])
    mean, std = scales["states"]
    returns_mean, returns_std = scales["returns"]
    outputs = reference.network(
        with_prefix(weights.tensors, "model."),
        weights.config.model,
        {
            "states": (torch.from_numpy(window.states[row : row + 1]) - mean) / std,
            "actions": torch.from_numpy(window.actions[row : row + 1]),
            "rewards": torch.full((1, 8, 1), torch.nan),
            "returns": (torch.full((1, 8, 1), target_return) - returns_mean) / returns_std,
        },
        reference.mask("policy", now, 8),
    )
    return outputs.mu[0, now:], outputs.log_sigma[0, now:]


def dense_utilities(
    weights: Weights, window: Window, row: int, plans: Tensor, guidance: Guidance
) -> Tensor:
    """Utilities [N] of the plans [N, h, A] of one row."""
    return reference.score(
        with_prefix(weights.tensors, "model."),
        weights.critic().min_q,
        weights.config,
        moments(weights),
        torch.from_numpy(window.states[row]),
        torch.from_numpy(window.actions[row]),
        int(window.now[row]),
        int(window.steps[row]),
        MAX_EPISODE_STEPS,
        plans,
        guidance,
    )


def dense_backward(weights: Weights, window: Window, row: int, *, single_mask: bool) -> Tensor:
    """Action [A] of one row towards its goal."""
    return reference.backward(
        with_prefix(weights.tensors, "model."),
        weights.config,
        moments(weights),
        torch.from_numpy(window.states[row]),
        torch.from_numpy(window.actions[row]),
        int(window.now[row]),
        single_mask,
    )
