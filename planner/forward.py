"""Forward M³PC: propose plans, imagine what follows, score it. All functions are pure.

E environments, all at the same position `now` of their windows; N plans of h = T - now steps each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from m3pc.config.schema import Config, PlannerConfig
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic
from m3pc.model.device import autocast
from m3pc.model.masks import ACTIONS, MODALITIES, RETURNS, REWARDS, STATES, only, places, visible
from m3pc.model.normalisation import Normaliser, Tokens
from planner.utility import lambda_return

Guidance = Literal["m", "q", "q0"]
QFunction = Callable[[Tensor, Tensor], Tensor]  # raw states [B, S], actions [B, A] -> [B]

# Rows of a chunk times the width: what a chunk computes stays in the caches.
CHUNK = 64_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningBatch:
    """Windows whose current step stands at the same place."""

    states: Tensor  # [E, T, S] raw
    actions: Tensor  # [E, T, A]
    now: int
    steps: Tensor  # [E] absolute step of the current state
    max_episode_steps: int  # H, the episode's step limit

    def rows(self, part: slice) -> "PlanningBatch":
        return replace(
            self, states=self.states[part], actions=self.actions[part], steps=self.steps[part]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """What follows each plan, in raw units; None where the guide does not ask for it."""

    rewards: Tensor | None = None  # [E, N, h - 1], from now on
    states: Tensor | None = None  # [E, N, h, S], from now on
    returns: Tensor | None = None  # [E, N, h], from now on


def propose(
    model: TrajectoryModel, normaliser: Normaliser, question: PlanningBatch, conditions: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and log sigma [E, h, A] of actions from now on, given the returns asked for [E]."""
    now, length = question.now, model.config.window
    asked = normaliser.returns.encode(conditions[:, None])
    tokens = _tokens(question, normaliser, returns=asked[:, None].expand(-1, length, -1))
    wanted = only(length, {ACTIONS: range(now, length)})
    found = model(tokens, visible("policy", now=now, length=length), wanted)
    return found.mu, found.log_sigma


def candidates(mu: Tensor, log_sigma: Tensor, noise: Tensor, noise_scale: float | Tensor) -> Tensor:
    """Plans [E, N, h, A]: every step and dimension drawn on its own."""
    return torch.tanh(mu[:, None] + noise_scale * log_sigma.exp()[:, None] * noise)


def score_plans(
    model: TrajectoryModel,
    critic: Critic,
    normaliser: Normaliser,
    config: Config,
    question: PlanningBatch,
    plans: Tensor,
    guide: Guidance,
) -> Tensor:
    """Utility of each plan: [E, N, h, A] -> [E, N]. A few plans at a time, so that they stay in
    the caches; which plans stand together changes nothing but rounding.

    The precision of `config` is the network's alone: bfloat16 has no room for the small
    differences between large values.
    """
    rows = []
    environments, count = plans.shape[:2]
    for part, blocks in _chunks(environments, count, CHUNK // model.config.width):
        asked = question.rows(part)
        found = []
        for block in blocks:
            some = plans[part, block]
            with autocast(config.compute):
                imagined = imagine(model, normaliser, asked, some, guide, config.planner)
            found.append(utilities(imagined, some, asked, config, guide, critic.quality))
        rows.append(torch.cat(found, dim=1))
    return torch.cat(rows)


def imagine(
    model: TrajectoryModel,
    normaliser: Normaliser,
    question: PlanningBatch,
    plans: Tensor,
    guide: Guidance,
    config: PlannerConfig,
) -> Imagined:
    """Predict what the guide asks for, under each plan [E, N, h, A].

    The past is embedded and projected once for all plans of an environment, only tokens that are
    given are encoded, and only places that are read are decoded.
    """
    now, length = question.now, model.config.window
    wanted = _asked_for(guide, config, now, length)
    if not wanted:  # the critic looks at what was observed
        return Imagined(states=_observed(question, plans))
    mask = visible("dynamics", now=now, length=length)
    past = places(
        mask & (np.arange(length) < now + (np.arange(len(MODALITIES)) == STATES)[:, None])
    )
    seen = normaliser.states.encode(question.states[:, : now + 1])
    shared = [model.embedded(STATES, seen, range(now + 1))]
    if now:
        shared.append(model.embedded(ACTIONS, question.actions[:, :now], range(now)))
    own = model.embedded(ACTIONS, plans.flatten(0, 1), range(now, length))
    memory = model.encode(own, torch.cat(shared, dim=1))
    given = (*past, *(place for place in places(mask) if place not in past))
    found = model.decode(memory, given, tuple(places(only(length, wanted))), seen)

    def raw(name: str) -> Tensor | None:
        x: Tensor | None = getattr(found, name)
        if x is None:
            return None
        decoded: Tensor = getattr(normaliser, name).decode(x)
        return decoded.view(*plans.shape[:2], *x.shape[1:])

    rewards, states, returns = raw("rewards"), raw("states"), raw("returns")
    if states is not None and config.state_now == "observed":
        states = torch.cat([_observed(question, plans), states], dim=2)
    return Imagined(
        rewards=None if rewards is None else rewards[..., 0],
        states=states,
        returns=None if returns is None else returns[..., 0],
    )


def utilities(
    imagined: Imagined,
    plans: Tensor,
    question: PlanningBatch,
    config: Config,
    guide: Guidance,
    quality: QFunction,
) -> Tensor:
    """Score what was imagined: [E, N]."""
    planner = config.planner
    if guide == "m":
        assert imagined.returns is not None
        values = imagined.returns * _return_scale(imagined.returns, question, config)
    else:
        assert imagined.states is not None
        steps = imagined.states.shape[2]
        flat = imagined.states.flatten(0, 2), plans[:, :, :steps].flatten(0, 2)
        values = quality(*flat).view(*plans.shape[:2], steps)
    if guide == "q0":
        return values[..., 0]
    rewards = values if imagined.rewards is None else imagined.rewards  # one step: none is used
    return lambda_return(
        rewards,
        values,
        discount=planner.discount,
        lam=planner.lam,
        start=planner.discount_start,
    )


def _observed(question: PlanningBatch, plans: Tensor) -> Tensor:
    """The current state, once for each plan: [E, N, 1, S]."""
    now = question.states[:, None, question.now : question.now + 1]
    return now.expand(-1, plans.shape[1], -1, -1)


def _return_scale(returns: Tensor, question: PlanningBatch, config: Config) -> Tensor | float:
    """Steps that an average return stands for."""
    if config.returns.mode == "sum":
        return 1.0
    if config.planner.return_scale == "1000-steps":
        return 1000.0
    ahead = torch.arange(returns.shape[-1], device=returns.device)
    left = question.max_episode_steps - (question.steps[:, None] + ahead)
    return left.clamp(min=0)[:, None].to(returns.dtype)


def _asked_for(guide: Guidance, config: PlannerConfig, now: int, length: int) -> dict[int, range]:
    """Steps that are read, by modality."""
    first = now if config.state_now == "reconstructed" else now + 1
    steps = {
        "m": {RETURNS: range(now, length), REWARDS: range(now, length - 1)},
        "q": {STATES: range(first, length), REWARDS: range(now, length - 1)},
        "q0": {STATES: range(first, now + 1)},
    }[guide]
    return {modality: span for modality, span in steps.items() if span}


def _tokens(question: PlanningBatch, normaliser: Normaliser, returns: Tensor) -> Tokens:
    states = normaliser.states.encode(question.states)
    return Tokens(states, question.actions, torch.zeros_like(returns), returns)


def _chunks(environments: int, plans: int, rows: int) -> Iterator[tuple[slice, list[slice]]]:
    """Whole environments while they fit into `rows`, else parts of one environment's plans."""
    block = min(plans, max(rows, 1))
    together = max(rows // plans, 1)
    blocks = [slice(n, n + block) for n in range(0, plans, block)]
    for first in range(0, environments, together):
        yield slice(first, first + together), blocks
