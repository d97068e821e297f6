"""Forward M³PC: propose plans, imagine what follows, score the plans, act on the best.

All E environments have their current step at the same position `now` of their windows. There are
N candidate plans of h = T - now steps each; S state, A action. All functions are pure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from m3pc.config.schema import Config, PlannerConfig
from m3pc.model.btm import DecodePlan, TrajectoryModel, decode_plan
from m3pc.model.critic import Critic
from m3pc.model.device import autocast, chunk_rows
from m3pc.model.masks import ACTIONS, RETURNS, REWARDS, STATES, token_indices, token_mask, visible
from m3pc.model.normalisation import Normaliser, Scale, Tokens
from m3pc.types import Integers

Guidance = Literal["m", "q", "q0"]
QFunction = Callable[[Tensor, Tensor], Tensor]  # raw states [B, S], actions [B, A] -> [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningBatch:
    """Windows of E environments with their current step at the same position."""

    states: Tensor  # [E, T, S] raw
    actions: Tensor  # [E, T, A]
    now: int
    steps: Tensor  # [E] absolute step of the current state
    target_returns: Tensor  # [E] the return-to-go that the policy is asked for
    max_episode_steps: int  # H, the episode's step limit

    def rows(self, part: slice) -> "PlanningBatch":
        """Select environments."""
        return replace(
            self,
            states=self.states[part],
            actions=self.actions[part],
            steps=self.steps[part],
            target_returns=self.target_returns[part],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The policy's Gaussian of every action from now on, before the tanh."""

    mu: Tensor  # [E, h, A]
    log_sigma: Tensor  # [E, h, A]

    def at(self, index: Integers) -> "Proposal":
        """Select environments."""
        if len(index) == len(self.mu):  # a copy's strides could change the last bits
            return self
        return Proposal(mu=self.mu[index], log_sigma=self.log_sigma[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """The predicted future of each plan, in raw units; what the guidance ignores is empty."""

    states: Tensor  # [E, N, h, S]
    rewards: Tensor  # [E, N, h - 1]
    returns: Tensor  # [E, N, h]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWeights:
    weights: Tensor  # [E, N], each row sums to 1
    effective_candidates: Tensor  # [E] effective sample size, 1 / sum of squared weights
    utility_std: Tensor  # [E] standard deviation of the utilities


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutput:
    actions: Tensor  # [E, A]
    utilities: Tensor  # [E, N]
    weighting: PlanWeights


def plan(
    model: TrajectoryModel,
    critic: Critic,
    normaliser: Normaliser,
    config: Config,
    batch: PlanningBatch,
    guidance: Guidance,
    *,
    noise: Tensor,
    chance: Tensor,
    sample: Tensor,
    proposal: Proposal | None = None,
) -> PlanOutput:
    """Plan with the model and return one action per environment.

    guidance  scores a plan: predicted returns "m", the critic along it "q" or at its start "q0"
    noise     [E, N, h, A] standard normal numbers that make N candidates
    chance    [E] uniform in [0, 1), selects the candidate if one is drawn
    sample    [E] True: draw one candidate by weight; False: take the weighted mean of all
    proposal  the result of stage 1 if the caller has it; it does not depend on the guidance
    """
    settings = config.planner.m if guidance == "m" else config.planner.q

    # 1. Propose. Given the past and the target return, the model predicts the distribution of all
    #    actions from now on (RCBC).
    if proposal is None:
        proposal = propose(model, normaliser, config, batch)

    # 2. Draw candidates: N plans of h actions, all numbers independent.
    plans = draw_candidates(proposal, noise, settings.spread)  # [E, N, h, A]

    utilities = plans.new_empty(plans.shape[:2])
    max_rows = chunk_rows(config.compute.device, model.config.width)
    for rows, columns in chunks(len(plans), plans.shape[1], max_rows):
        part, candidates = batch.rows(rows), plans[rows, columns]

        # 3. Imagine. The dynamics mask shows the past and the actions of a candidate; one pass
        #    predicts the states, rewards and returns that follow.
        with autocast(config.compute):
            imagined = imagine(model, normaliser, config.planner, part, candidates, guidance)

        # 4. Score: the lambda return of imagined rewards and of values (predicted returns or the
        #    critic's), in full precision: utilities are large and their differences small.
        utilities[rows, columns] = score(imagined, candidates, part, config, guidance, critic.min_q)

    # 5. Weigh: a softmax of the utilities at an inverse temperature.
    weighting = softmax_weights(
        utilities,
        inverse_temperature=settings.inverse_temperature,
        standardised=config.planner.utility == "standardised",
    )

    # 6. Choose the first action of one candidate drawn by weight, or of their weighted mean.
    first, weights = plans[:, :, 0], weighting.weights
    mean = torch.einsum("en,ena->ea", weights, first)
    below = weights.cumsum(dim=-1) < chance[:, None] * weights.sum(dim=-1, keepdim=True)
    index = below.sum(dim=-1).clamp(max=weights.shape[-1] - 1)  # [E]
    drawn = first[torch.arange(len(first), device=first.device), index]
    actions = torch.where(sample[:, None], drawn, mean)
    return PlanOutput(actions=actions, utilities=utilities, weighting=weighting)


def propose(
    model: TrajectoryModel, normaliser: Normaliser, config: Config, batch: PlanningBatch
) -> Proposal:
    """Distribution of the actions from now on, given the target returns."""
    now, length = batch.now, model.config.window
    returns = normaliser.returns.encode(batch.target_returns[:, None])
    returns = returns[:, None].expand(-1, length, -1)  # the same at every step
    states = normaliser.states.encode(batch.states)
    tokens = Tokens(states, batch.actions, torch.zeros_like(returns), returns)
    with autocast(config.compute):
        prediction = model(
            tokens,
            visible("policy", now=now, length=length),
            read=token_mask(length, {ACTIONS: range(now, length)}),
        )
    return Proposal(mu=prediction.mu.float(), log_sigma=prediction.log_sigma.float())


def draw_candidates(proposal: Proposal, noise: Tensor, noise_scale: float | Tensor) -> Tensor:
    """Plans [E, N, h, A] from a proposal and standard normal noise [E, N, h, A]."""
    sigma = proposal.log_sigma.exp()[:, None]
    return torch.tanh(proposal.mu[:, None] + noise_scale * sigma * noise)


def imagine(
    model: TrajectoryModel,
    normaliser: Normaliser,
    config: PlannerConfig,
    batch: PlanningBatch,
    plans: Tensor,
    guidance: Guidance,
) -> Imagined:
    """Predict what the guidance reads, under each plan [E, N, h, A].

    The past is embedded and projected once for all plans of an environment, only visible tokens are
    encoded, and only tokens that are read are decoded.
    """
    now, length = batch.now, model.config.window
    observed = batch.states[:, None, now : now + 1].expand(-1, plans.shape[1], -1, -1)
    decoding = _dynamics_decoding(guidance, config.state_now, now, length)
    if decoding is None:  # the critic reads the observed state alone
        nothing = plans.new_empty(*plans.shape[:2], 0)
        return Imagined(states=observed, rewards=nothing, returns=nothing)
    past_states = normaliser.states.encode(batch.states[:, : now + 1])
    past = [model.embed_tokens(STATES, past_states, range(now + 1))]
    if now:
        past.append(model.embed_tokens(ACTIONS, batch.actions[:, :now], range(now)))
    own = model.embed_tokens(ACTIONS, plans.flatten(0, 1), range(now, length))
    encoded = model.encode(own, shared=torch.cat(past, dim=1))
    prediction = model.decode(encoded, decoding, past_states)

    def raw(scale: Scale, x: Tensor) -> Tensor:
        return scale.decode(x).view(*plans.shape[:2], *x.shape[1:])

    states = raw(normaliser.states, prediction.states)
    if config.state_now == "observed":
        states = torch.cat([observed, states], dim=2)
    return Imagined(
        states=states,
        rewards=raw(normaliser.rewards, prediction.rewards)[..., 0],
        returns=raw(normaliser.returns, prediction.returns)[..., 0],
    )


def score(
    imagined: Imagined,
    plans: Tensor,
    batch: PlanningBatch,
    config: Config,
    guidance: Guidance,
    q: QFunction,
) -> Tensor:
    """Score plans [E, N, h, A] by their imagined future: utilities [E, N]."""
    if guidance == "m":
        values = imagined.returns * _steps_per_return(imagined.returns, batch, config)
    else:
        steps = imagined.states.shape[2]
        pairs = imagined.states.flatten(0, 2), plans[:, :, :steps].flatten(0, 2)
        values = q(*pairs).view(*plans.shape[:2], steps)
    if guidance == "q0":
        return values[..., 0]
    planner = config.planner
    return lambda_return(
        imagined.rewards,
        values,
        discount=planner.discount,
        lam=planner.lam,
        start=planner.discount_start,
    )


def lambda_return(
    rewards: Tensor, values: Tensor, *, discount: float, lam: float, start: int = 0
) -> Tensor:
    """Blend all n-step returns of an imagined rollout: values [..., h] -> [...].

    The return of n steps of reward and then the value has the weight (1 - lam) lam^n, for n = 0 to
    h - 1; the last one gets the remaining weight. Only the first h - 1 rewards are used. `start`
    is the power of the discount on the first term.
    """
    score = values[..., -1]
    for n in reversed(range(values.shape[-1] - 1)):
        score = (1 - lam) * values[..., n] + lam * (rewards[..., n] + discount * score)
    return score * discount**start


def softmax_weights(
    utilities: Tensor, *, inverse_temperature: float, standardised: bool
) -> PlanWeights:
    """Softmax of utilities [E, N], in units of their standard deviation if `standardised`."""
    std = utilities.std(dim=-1, unbiased=False)
    below_best = utilities - utilities.amax(dim=-1, keepdim=True)  # exp of these cannot overflow
    if standardised:
        below_best = below_best / torch.where(std > 0, std, 1.0)[:, None]
    weights = torch.softmax(inverse_temperature * below_best, dim=-1)
    return PlanWeights(
        weights=weights, effective_candidates=1 / weights.square().sum(dim=-1), utility_std=std
    )


def chunks(environments: int, plans: int, max_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of environments and plans to compute at a time: whole environments if they fit
    into `max_rows`, else parts of one environment's plans."""
    height, width = max(max_rows // plans, 1), min(max(max_rows, 1), plans)
    for row, column in product(range(0, environments, height), range(0, plans, width)):
        yield slice(row, row + height), slice(column, column + width)


@lru_cache(maxsize=1024)
def _dynamics_decoding(
    guidance: Guidance, state_now: str, now: int, length: int
) -> DecodePlan | None:
    """The decode plan for a guidance; None if the decoder has nothing to read."""
    first_state = now if state_now == "reconstructed" else now + 1
    read = token_mask(
        length,
        {
            "m": {RETURNS: range(now, length), REWARDS: range(now, length - 1)},
            "q": {STATES: range(first_state, length), REWARDS: range(now, length - 1)},
            "q0": {STATES: range(first_state, now + 1)},
        }[guidance],
    )
    if not read.any():
        return None
    past = token_mask(length, {STATES: range(now + 1), ACTIONS: range(now)})
    planned = visible("dynamics", now=now, length=length) & ~past
    given = (*token_indices(past), *token_indices(planned))  # `imagine` encodes in this order
    return decode_plan(given, tuple(token_indices(read)), length)


def _steps_per_return(returns: Tensor, batch: PlanningBatch, config: Config) -> Tensor | float:
    """The factor that turns predicted returns [E, N, h] into sums of rewards: the remaining steps,
    if a return is a mean."""
    if config.returns.mode == "sum":
        return 1.0
    if config.planner.return_scale == "1000-steps":
        return 1000.0
    ahead = torch.arange(returns.shape[-1], device=returns.device)
    left = batch.max_episode_steps - (batch.steps[:, None] + ahead)
    return left.clamp(min=0)[:, None].to(returns.dtype)
