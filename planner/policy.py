"""Weights that answer questions: windows of any environments in, one decision out.

E environments, N candidates, h steps of a plan, A action.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m3pc.compute import autocast
from m3pc.config import BACKWARD, Config
from m3pc.streams import PLAN, counter_stream
from m3pc.types import Decision, Floats, InputError, Window
from m3pc.weights import Weights
from planner.backward import towards_goal
from planner.forward import Question, candidates, propose, score
from planner.utility import Weighing, weigh


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Actions of one group of environments, with the numbers behind them."""

    actions: Tensor  # [E, A]
    utilities: Tensor | None = None  # [E, N]
    weighing: Weighing | None = None


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
        self._check(window)
        conditions = self.conditions(window.steps, explore=explore)
        found = {
            "actions": np.empty((len(window), self.weights.action_size), np.float32),
            "utilities": np.full(len(window), np.nan, np.float32),
            "effective": np.full(len(window), np.nan, np.float32),
            "spread": np.full(len(window), np.nan, np.float32),
        }
        for now in np.unique(window.now):
            rows = np.flatnonzero(window.now == now)
            with torch.inference_mode():
                choice = self._choose(window, rows, conditions[rows], explore)
            found["actions"][rows] = choice.actions.clamp(-1, 1).cpu().numpy()
            if choice.weighing is not None and choice.utilities is not None:
                weights = choice.weighing.weights
                mean = (weights * choice.utilities).sum(dim=-1)
                found["utilities"][rows] = mean.cpu().numpy()
                found["effective"][rows] = choice.weighing.effective.cpu().numpy()
                found["spread"][rows] = choice.weighing.spread.cpu().numpy()
        backward = self.config.planner.mode in BACKWARD
        return Decision(
            conditions=np.full_like(conditions, np.nan) if backward else conditions,
            version=self.weights.version,
            **found,
        )

    def conditions(self, steps: NDArray[np.int64], *, explore: bool) -> Floats:
        """The return to ask for at each absolute step."""
        config, envelope = self.config.conditioning, self.weights.envelope
        kind = config.exploration if explore else config.evaluation
        ratio = np.float32(config.exploration_ratio if explore else config.evaluation_ratio)
        if kind == "envelope":
            return ratio * envelope[np.minimum(steps, len(envelope) - 1)]
        low, high = self.weights.return_range
        most = low + (high - low) * ratio if explore else ratio * high
        return np.full(len(steps), most, np.float32)

    def _choose(
        self, window: Window, rows: NDArray[np.int64], conditions: Floats, explore: bool
    ) -> Choice:
        mode, planner = self.config.planner.mode, self.config.planner
        question = self._question(window, rows)
        if mode == "goal" or mode == "goal-mask":  # noqa: PLR1714 (mypy narrows by it)
            one_mask = mode == "goal-mask"
            with autocast(self.config.compute):
                mu = towards_goal(
                    self._model, self._normaliser, self.config.goal, question, one_mask=one_mask
                )
            return Choice(actions=mu.float().tanh())
        asked = torch.as_tensor(conditions, device=self._device)
        with autocast(self.config.compute):
            mu, log_sigma = propose(self._model, self._normaliser, question, asked)
        mu, log_sigma = mu.float(), log_sigma.float()
        by_sample = (planner.explore_by if explore else planner.evaluate_by) == "sample"
        if mode == "rcbc":
            noise, _ = self._random(window, rows, (1, *mu.shape[1:]))
            drawn = candidates(mu, log_sigma, noise, float(by_sample))
            return Choice(actions=drawn[:, 0, 0])
        guide = planner.m if mode == "m" else planner.q
        noise, chance = self._random(window, rows, (planner.candidates, *mu.shape[1:]))
        plans = candidates(mu, log_sigma, noise, guide.spread)
        utilities = score(
            self._model, self._critic, self._normaliser, self.config, question, plans, mode
        )
        weighing = weigh(
            utilities,
            inverse_temperature=guide.inverse_temperature,
            standardised=planner.utility == "standardised",
        )
        first = plans[:, :, 0]
        actions = (
            _drawn(first, weighing.weights, chance)
            if by_sample
            else torch.einsum("en,ena->ea", weighing.weights, first)
        )
        return Choice(actions=actions, utilities=utilities, weighing=weighing)

    def _question(self, window: Window, rows: NDArray[np.int64]) -> Question:
        def on_device(array: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
            return torch.as_tensor(array[rows], device=self._device)

        return Question(
            states=on_device(window.states),
            actions=on_device(window.actions),
            now=int(window.now[rows[0]]),
            steps=on_device(window.steps),
            horizon=self.weights.horizon,
        )

    def _random(
        self, window: Window, rows: NDArray[np.int64], shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Noise [E, N, h, A] and a chance [E], from each episode's own stream at its own step."""
        noise = np.empty((len(rows), *shape), np.float32)
        chance = np.empty(len(rows), np.float32)
        for i, row in enumerate(rows):
            rng = counter_stream(int(window.seeds[row]), int(window.steps[row]), PLAN)
            rng.standard_normal(dtype=np.float32, out=noise[i])
            chance[i] = rng.random(dtype=np.float32)
        device = self._device
        return torch.as_tensor(noise, device=device), torch.as_tensor(chance, device=device)

    def _check(self, window: Window) -> None:
        length = self.config.model.window
        wanted = {
            "states": (len(window), length, self.weights.state_size),
            "actions": (len(window), length, self.weights.action_size),
            "steps": (len(window),),
            "seeds": (len(window),),
        }
        for name, shape in wanted.items():
            found = getattr(window, name).shape
            if found != shape:
                raise InputError(f"a window's {name} are {list(found)}, expected {list(shape)}")
        if (window.seeds < 0).any():
            raise InputError(f"a window's seed is {window.seeds.min()}; give 0 or more")
        if not (np.isfinite(window.states).all() and np.isfinite(window.actions).all()):
            raise InputError("a window holds NaN or Inf; give finite states and actions")
        if not ((window.now >= 0) & (window.now < length)).all():
            raise InputError(f"a window's current step must be in 0 .. {length - 1}")


def _drawn(first: Tensor, weights: Tensor, chance: Tensor) -> Tensor:
    """The first action of one plan a row, drawn by weight: [E, A]."""
    passed = weights.cumsum(dim=-1) < chance[:, None] * weights.sum(dim=-1, keepdim=True)
    chosen = passed.sum(dim=-1).clamp(max=weights.shape[-1] - 1)
    return first[torch.arange(len(first), device=first.device), chosen]
