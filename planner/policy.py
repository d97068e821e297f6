"""Weights that answer questions: windows of any environments in, one decision out.

E environments, N candidates, h steps of a plan, A action.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m3pc.config.schema import BACKWARD, Config
from m3pc.core.rng import PLAN, ReusableStream
from m3pc.model.device import autocast
from m3pc.model.weights import Weights
from m3pc.types import Decision, Floats, InputError, Integers, PlanRequest, Window
from planner.backward import towards_goal
from planner.forward import Guidance, PlanningBatch, candidates, propose, score_plans
from planner.requests import apart, joined, some
from planner.utility import PlanWeights, softmax_weights
from planner.validation import check_ask

FORWARD: tuple[Literal["rcbc"] | Guidance, ...] = ("rcbc", "m", "q", "q0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """Requests end to end, a row an environment, with what each asks for."""

    window: Window
    modes: NDArray[np.str_]  # [E]
    sampled: NDArray[np.bool_]  # [E] whether one action is drawn, not the mean taken
    conditions: Floats  # [E] NaN where a plan is from a goal
    candidates: Integers  # [E] of those that plan

    def at(self, index: Integers) -> "RequestBatch":
        return RequestBatch(
            window=some(self.window, index),
            modes=self.modes[index],
            sampled=self.sampled[index],
            conditions=self.conditions[index],
            candidates=self.candidates[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the policy would do from now on."""

    mu: Tensor  # [E, h, A]
    log_sigma: Tensor  # [E, h, A]

    def at(self, index: Integers) -> "Proposal":
        if len(index) == len(self.mu):  # a copy's strides could change the last bits
            return self
        return Proposal(mu=self.mu[index], log_sigma=self.log_sigma[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutput:
    """Actions of one group of environments, with the numbers behind them."""

    actions: Tensor  # [E, A]
    utilities: Tensor | None = None  # [E, N]
    weighing: PlanWeights | None = None


class Policy:
    """A Planner that keeps nothing between two calls. The configuration may differ from the one
    that the weights were trained with, in how to plan but not in what the model is."""

    def __init__(self, weights: Weights, config: Config | None = None) -> None:
        self.config = config or weights.config
        if (self.config.model, self.config.returns) != (
            weights.config.model,
            weights.config.returns,
        ):
            raise InputError("settings under model and returns belong to the weights; drop them")
        self.weights = weights
        self._device = self.config.compute.device
        self._model = weights.model(self._device)
        self._critic = weights.critic(self._device)
        self._normaliser = weights.normaliser(self._device)

    def decide(self, window: Window, *, explore: bool = False) -> Decision:
        """Each environment's answer is its own, whatever else is asked at the same time."""
        return self.answer([PlanRequest(window=window, explore=explore)])[0]

    def answer(self, asks: Sequence[PlanRequest]) -> list[Decision]:
        """Several requests as one batch, each in its own mode; one decision a request."""
        for ask in asks:
            self.check(ask)
        rows = self._rows(asks)
        found = {
            "actions": np.empty((len(rows.modes), self.weights.action_size), np.float32),
            "utilities": np.full(len(rows.modes), np.nan, np.float32),
            "effective_candidates": np.full(len(rows.modes), np.nan, np.float32),
            "utility_std": np.full(len(rows.modes), np.nan, np.float32),
        }
        with torch.inference_mode():
            for now in np.unique(rows.window.now):
                index = np.flatnonzero(rows.window.now == now)
                for part, choice in self._choices(rows.at(index)):
                    _put(found, index[part], choice)
        decision = Decision(target_returns=rows.conditions, version=self.weights.version, **found)
        return apart(decision, [len(ask.window) for ask in asks])

    def check(self, ask: PlanRequest) -> None:
        """Refuse what these weights cannot answer."""
        check_ask(
            ask,
            length=self.config.model.window,
            state_size=self.weights.state_size,
            action_size=self.weights.action_size,
        )

    def conditions(
        self,
        steps: Integers,
        *,
        explore: bool,
        ratio: float | None = None,
        to_come: float | None = None,
    ) -> Floats:
        """The return to ask for at each absolute step; `to_come` is a sum of rewards."""
        if to_come is not None:
            return (to_come * self.weights.return_rule.scale(steps)).astype(np.float32)
        config, envelope = self.config.conditioning, self.weights.envelope
        kind = config.exploration if explore else config.evaluation
        if ratio is None:
            ratio = config.exploration_ratio if explore else config.evaluation_ratio
        times = np.float32(ratio)
        if kind == "envelope":
            return times * envelope[np.minimum(steps, len(envelope) - 1)]
        low, high = self.weights.return_range
        most = low + (high - low) * times if explore else times * high
        return np.full(len(steps), most, np.float32)

    def _rows(self, asks: Sequence[PlanRequest]) -> RequestBatch:
        planner = self.config.planner
        sizes = [len(ask.window) for ask in asks]
        modes = [ask.mode or planner.mode for ask in asks]
        by = [
            "mean" if ask.mean else planner.explore_by if ask.explore else planner.evaluate_by
            for ask in asks
        ]
        conditions = [
            np.full(len(ask.window), np.nan, np.float32)
            if mode in BACKWARD
            else self.conditions(
                ask.window.steps, explore=ask.explore, ratio=ask.ratio, to_come=ask.target_remaining
            )
            for ask, mode in zip(asks, modes, strict=True)
        ]
        return RequestBatch(
            window=joined([ask.window for ask in asks]),
            modes=np.repeat(modes, sizes),
            sampled=np.repeat([way == "sample" for way in by], sizes),
            conditions=np.concatenate(conditions),
            candidates=np.repeat([ask.candidates or planner.candidates for ask in asks], sizes),
        )

    def _choices(self, rows: RequestBatch) -> Iterator[tuple[Integers, PlanOutput]]:
        """Of rows at the same `now`, by mode and number of candidates: which rows, and their
        actions. The policy's proposals are asked for once for all that look forwards."""
        for mode in BACKWARD:
            if len(part := np.flatnonzero(rows.modes == mode)):
                yield part, self._towards_goal(rows.at(part), one_mask=mode == "goal-mask")
        forward = np.flatnonzero(~np.isin(rows.modes, BACKWARD))
        if not len(forward):
            return
        proposal = self._proposed(rows.at(forward))
        for mode in FORWARD:
            for part in _alike(rows.at(forward), mode):
                mine, proposed = rows.at(forward[part]), proposal.at(part)
                choice = (
                    self._cloned(mine, proposed)
                    if mode == "rcbc"
                    else self._planned(mine, proposed, mode)
                )
                yield forward[part], choice

    def _towards_goal(self, rows: RequestBatch, *, one_mask: bool) -> PlanOutput:
        question = self._question(rows.window)
        with autocast(self.config.compute):
            mu = towards_goal(
                self._model, self._normaliser, self.config.goal, question, one_mask=one_mask
            )
        return PlanOutput(actions=mu.float().tanh())

    def _proposed(self, rows: RequestBatch) -> Proposal:
        asked = torch.as_tensor(rows.conditions, device=self._device)
        with autocast(self.config.compute):
            mu, log_sigma = propose(
                self._model, self._normaliser, self._question(rows.window), asked
            )
        return Proposal(mu=mu.float(), log_sigma=log_sigma.float())

    def _cloned(self, rows: RequestBatch, proposal: Proposal) -> PlanOutput:
        """The proposal's median, or one draw from it."""
        noise, _ = self._random(rows.window, (1, *proposal.mu.shape[1:]))
        spread = self._sampled(rows).float()[:, None, None, None]
        drawn = candidates(proposal.mu, proposal.log_sigma, noise, spread)
        return PlanOutput(actions=drawn[:, 0, 0])

    def _planned(self, rows: RequestBatch, proposal: Proposal, guide: Guidance) -> PlanOutput:
        planner = self.config.planner
        settings = planner.m if guide == "m" else planner.q
        shape = (int(rows.candidates[0]), *proposal.mu.shape[1:])
        noise, chance = self._random(rows.window, shape)
        plans = candidates(proposal.mu, proposal.log_sigma, noise, settings.spread)
        utilities = score_plans(
            self._model,
            self._critic,
            self._normaliser,
            self.config,
            self._question(rows.window),
            plans,
            guide,
        )
        weighing = softmax_weights(
            utilities,
            inverse_temperature=settings.inverse_temperature,
            standardised=planner.utility == "standardised",
        )
        first = plans[:, :, 0]
        actions = torch.where(
            self._sampled(rows)[:, None],
            _drawn(first, weighing.weights, chance),
            torch.einsum("en,ena->ea", weighing.weights, first),
        )
        return PlanOutput(actions=actions, utilities=utilities, weighing=weighing)

    def _sampled(self, rows: RequestBatch) -> Tensor:
        return torch.as_tensor(rows.sampled, device=self._device)

    def _question(self, window: Window) -> PlanningBatch:
        return PlanningBatch(
            states=torch.as_tensor(window.states, device=self._device),
            actions=torch.as_tensor(window.actions, device=self._device),
            now=int(window.now[0]),
            steps=torch.as_tensor(window.steps, device=self._device),
            max_episode_steps=self.weights.max_episode_steps,
        )

    def _random(self, window: Window, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Noise [E, N, h, A] and a chance [E], from each episode's own stream at its own step."""
        noise = np.empty((len(window), *shape), np.float32)
        chance = np.empty(len(window), np.float32)
        streams = ReusableStream()
        numbers = zip(window.seeds.tolist(), window.steps.tolist(), strict=True)
        for row, (seed, step) in enumerate(numbers):
            rng = streams.at(seed, step, PLAN)
            rng.standard_normal(dtype=np.float32, out=noise[row])
            chance[row] = rng.random(dtype=np.float32)
        device = self._device
        return torch.as_tensor(noise, device=device), torch.as_tensor(chance, device=device)


def _alike(rows: RequestBatch, mode: str) -> Iterator[Integers]:
    """The rows of a mode, those with as many candidates together."""
    of_mode = rows.modes == mode
    counts = np.where(mode == "rcbc", 1, rows.candidates)  # which draws one, whatever was asked
    for count in np.unique(counts[of_mode]):
        yield np.flatnonzero(of_mode & (counts == count))


def _put(found: Mapping[str, Floats], rows: Integers, choice: PlanOutput) -> None:
    found["actions"][rows] = choice.actions.clamp(-1, 1).cpu().numpy()
    if choice.weighing is not None and choice.utilities is not None:
        mean = (choice.weighing.weights * choice.utilities).sum(dim=-1)
        found["utilities"][rows] = mean.cpu().numpy()
        found["effective_candidates"][rows] = choice.weighing.effective_candidates.cpu().numpy()
        found["utility_std"][rows] = choice.weighing.utility_std.cpu().numpy()


def _drawn(first: Tensor, weights: Tensor, chance: Tensor) -> Tensor:
    """The first action of one plan a row, drawn by weight: [E, A]."""
    passed = weights.cumsum(dim=-1) < chance[:, None] * weights.sum(dim=-1, keepdim=True)
    chosen = passed.sum(dim=-1).clamp(max=weights.shape[-1] - 1)
    return first[torch.arange(len(first), device=first.device), chosen]
