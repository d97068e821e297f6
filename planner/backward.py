"""Backward M³PC: infer the states between now and a goal, then the action that leads there.

E environments, all at the same position `now`; states after it are waypoints, the last the goal.
"""

import torch
from torch import Tensor

from m3pc.config.schema import GoalConfig
from m3pc.model.btm import TrajectoryModel
from m3pc.model.masks import ACTIONS, STATES, Mask, only, visible
from m3pc.model.normalisation import Normaliser, Tokens
from planner.forward import PlanningBatch


def towards_goal(
    model: TrajectoryModel,
    normaliser: Normaliser,
    config: GoalConfig,
    question: PlanningBatch,
    *,
    one_mask: bool = False,
) -> Tensor:
    """Mean of the next action before the tanh: [E, A]. With `one_mask` no path is inferred first,
    the action is read beside it."""
    now, length = question.now, model.config.window
    shown = _shown(config, now, length)
    states = normaliser.states.encode(question.states)
    if not one_mask:
        path = model(_tokens(states, question), shown, only(length, {STATES: range(length)})).states
        states = torch.where(_filled(config, now, length).to(path.device)[:, None], path, states)
        shown = visible("inverse", now=now, length=length)
    found: Tensor = model(_tokens(states, question), shown, only(length, {ACTIONS: [now]})).mu
    return found[:, 0]


def _shown(config: GoalConfig, now: int, length: int) -> Mask:
    if now == 0 and config.first_visible == "waypoints":
        return visible("inverse", now=now, length=length)
    return visible("path", now=now, length=length)


def _filled(config: GoalConfig, now: int, length: int) -> Tensor:
    """Positions whose states are replaced by inferred ones: bool [T]."""
    t = torch.arange(length)
    if config.fill == "between":
        return (t > now) & (t < length - 1)
    return (t <= now) | ((t > now + 1) & (t < length - 1))


def _tokens(states: Tensor, question: PlanningBatch) -> Tokens:
    nothing = torch.zeros_like(states[..., :1])
    return Tokens(states, question.actions, nothing, nothing)
