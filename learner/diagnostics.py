"""Errors of model and critic on held-out episodes, which decide whether planning can work."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.trajectory import tokens
from m3pc.config.schema import Config
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic
from m3pc.model.masks import visible
from m3pc.model.normalisation import Normaliser
from m3pc.types import TransitionBatch, WindowBatch


@torch.no_grad()
def measure_model(
    model: TrajectoryModel,
    normaliser: Normaliser,
    config: Config,
    batches: Iterable[WindowBatch[NDArray[Any]]],
) -> dict[str, float]:
    """Mean squared errors in the model's space, with the current step where planning puts it.

    `copy_*` is the error of repeating the current state. Always predicting the mean has an error of
    about 1, and of `action_spread` for actions, which are not normalised. Actions are predicted as
    a policy (`action`), between known states as in backward planning (`action_between`), and
    towards the window's last state (`action_towards`).
    """
    model.eval()
    length = config.model.window
    now = min(config.context, length - 2)  # at least one step ahead
    rows: list[dict[str, Tensor]] = []
    for batch in batches:
        truth = tokens(batch, normaliser, config)
        dynamics = model(truth, visible("dynamics", now=now, length=length))
        policy = model(truth, visible("policy", now=now, length=length))
        between = model(truth, visible("inverse", now=now, length=length))
        towards = model(truth, visible("path", now=now, length=length))
        actions = truth.actions[:, now]
        current = truth.states[:, now]
        rows.append(
            {
                "state_1": _error(dynamics.states[:, now + 1], truth.states[:, now + 1]),
                "copy_1": _error(current, truth.states[:, now + 1]),
                "state_h": _error(dynamics.states[:, -1], truth.states[:, -1]),
                "copy_h": _error(current, truth.states[:, -1]),
                "reward": _error(dynamics.rewards[:, now:], truth.rewards[:, now:]),
                "return": _error(dynamics.returns[:, now:], truth.returns[:, now:]),
                "action": _error(policy.mu[:, now].tanh(), actions),
                "action_between": _error(between.mu[:, now].tanh(), actions),
                "action_towards": _error(towards.mu[:, now].tanh(), actions),
                "action_spread": _error(actions.mean(dim=0), actions),
            }
        )
    return {name: torch.stack([row[name] for row in rows]).mean().item() for name in rows[0]}


@torch.no_grad()
def measure_critic(
    critic: Critic, batches: Iterable[TransitionBatch[NDArray[Any]]]
) -> dict[str, float]:
    """Means of V, Q and the observed discounted return; correlations of V and Q with the return."""
    device = critic.state_mean.device
    parts: dict[str, list[NDArray[Any]]] = {"v": [], "q": [], "seen": []}
    for batch in batches:
        states, actions = (torch.as_tensor(x).to(device) for x in (batch.states, batch.actions))
        parts["v"].append(critic.value(states).cpu().numpy())
        parts["q"].append(critic.min_q(states, actions).cpu().numpy())
        parts["seen"].append(batch.returns)
    columns = {name: np.concatenate(arrays).astype(np.float64) for name, arrays in parts.items()}
    means = {f"{name}_mean": float(column.mean()) for name, column in columns.items()}
    return means | {
        f"{name}_correlation": _correlation(columns[name], columns["seen"]) for name in ("v", "q")
    }


def _error(predicted: Tensor, truth: Tensor) -> Tensor:
    return (predicted - truth).square().mean()


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    scale = x.std() * y.std()
    return float(((x - x.mean()) * (y - y.mean())).mean() / scale) if scale else 0.0
