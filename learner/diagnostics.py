"""What decides whether planning can work, measured on episodes that nothing was learned from."""

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
    """Mean squared errors in the model's space, with the present at the place it has in planning.

    `copy_*` is the error of taking the last seen state for every later one; 1 is about the error of
    always answering the mean. Of actions, which are not normalised, that is `action_spread`; they
    are asked for as a policy, between states that are all known (backward planning), and towards
    the last state of the window (a single mask).
    """
    model.eval()
    length = config.model.window
    now = min(config.context, length - 2)  # at least one step ahead
    rows: list[dict[str, Tensor]] = []
    for batch in batches:
        truth = tokens(batch, normaliser, config)
        ahead = model(truth, visible("dynamics", now=now, length=length))
        policy = model(truth, visible("policy", now=now, length=length))
        between = model(truth, visible("inverse", now=now, length=length))
        towards = model(truth, visible("path", now=now, length=length))
        actions = truth.actions[:, now]
        kept = truth.states[:, now]
        rows.append(
            {
                "state_1": _error(ahead.states[:, now + 1], truth.states[:, now + 1]),
                "copy_1": _error(kept, truth.states[:, now + 1]),
                "state_h": _error(ahead.states[:, -1], truth.states[:, -1]),
                "copy_h": _error(kept, truth.states[:, -1]),
                "reward": _error(ahead.rewards[:, now:], truth.rewards[:, now:]),
                "return": _error(ahead.returns[:, now:], truth.returns[:, now:]),
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
    """Means of V, Q and the discounted return seen, and how V and Q go with it (correlation)."""
    device = critic.state_mean.device
    found: dict[str, list[NDArray[Any]]] = {"v": [], "q": [], "seen": []}
    for batch in batches:
        states, actions = (torch.as_tensor(x).to(device) for x in (batch.states, batch.actions))
        found["v"].append(critic.value(states).cpu().numpy())
        found["q"].append(critic.quality(states, actions).cpu().numpy())
        found["seen"].append(batch.returns)
    columns = {name: np.concatenate(parts).astype(np.float64) for name, parts in found.items()}
    means = {f"{name}_mean": float(column.mean()) for name, column in columns.items()}
    return means | {
        f"{name}_correlation": _correlation(columns[name], columns["seen"]) for name in ("v", "q")
    }


def _error(found: Tensor, truth: Tensor) -> Tensor:
    return (found - truth).square().mean()


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    spread = one.std() * other.std()
    return float(((one - one.mean()) * (other - other.mean())).mean() / spread) if spread else 0.0
