"""Backward M³PC: infer the states between now and a goal, then the action that leads there.

All E environments have their current step at position `now`. Later states are waypoints, the last
of them is the goal.
"""

import torch
from torch import Tensor

from m3pc.config.schema import Config, GoalConfig
from m3pc.model.btm import TrajectoryModel
from m3pc.model.device import autocast
from m3pc.model.masks import ACTIONS, STATES, Mask, token_mask, visible
from m3pc.model.normalisation import Normaliser, Tokens
from planner.forward import PlanningBatch


def plan_backward(
    model: TrajectoryModel,
    normaliser: Normaliser,
    config: Config,
    batch: PlanningBatch,
    *,
    single_mask: bool = False,
) -> Tensor:
    """The next action towards the goal: [E, A].

    `single_mask` selects the baseline, which reads the action in one pass and infers no path.
    """
    now, length = batch.now, model.config.window
    mask = _goal_mask(config.goal, now, length)
    states = normaliser.states.encode(batch.states)
    nothing = torch.zeros_like(states[..., :1])  # rewards and returns are always hidden
    with autocast(config.compute):
        if not single_mask:
            # 1. Infer the path: the states between now and the goal.
            tokens = Tokens(states, batch.actions, nothing, nothing)
            path = model(tokens, mask, read=token_mask(length, {STATES: range(length)})).states
            inferred = _inferred_steps(config.goal, now, length).to(path.device)
            states = torch.where(inferred[:, None], path, states)
            mask = visible("inverse", now=now, length=length)
        # 2. Infer the action that follows the path.
        tokens = Tokens(states, batch.actions, nothing, nothing)
        mu: Tensor = model(tokens, mask, read=token_mask(length, {ACTIONS: [now]})).mu
    return mu[:, 0].float().tanh()


def _goal_mask(config: GoalConfig, now: int, length: int) -> Mask:
    if now == 0 and config.first_visible == "waypoints":
        return visible("inverse", now=now, length=length)
    return visible("path", now=now, length=length)


def _inferred_steps(config: GoalConfig, now: int, length: int) -> Tensor:
    """Steps whose states are replaced by inferred ones: bool [T]."""
    t = torch.arange(length)
    if config.fill == "between":
        return (t > now) & (t < length - 1)
    return (t <= now) | ((t > now + 1) & (t < length - 1))
