"""Weights that answer planning requests: windows of any environments in, decisions out.

E environments, N candidates, h steps of a plan, A action.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m3pc.config.schema import BACKWARD, Config
from m3pc.core.rng import PLAN, ReusableStream
from m3pc.model.device import memory_errors
from m3pc.model.weights import Weights
from m3pc.types import Decision, Floats, InputError, Integers, PlanRequest, Window
from planner.backward import plan_backward
from planner.forward import (
    Guidance,
    PlanningBatch,
    PlanOutput,
    Proposal,
    draw_candidates,
    plan,
    propose,
)
from planner.requests import concatenate, select_rows, split_decision
from planner.validation import check_request

FORWARD: tuple[Literal["rcbc"] | Guidance, ...] = ("rcbc", "m", "q", "q0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """Requests concatenated, one row per environment, with the settings of its request."""

    window: Window
    modes: NDArray[np.str_]  # [E]
    sample: NDArray[np.bool_]  # [E] True: draw one action; False: take the mean
    target_returns: Floats  # [E] NaN in backward modes
    candidates: Integers  # [E] used only in modes with candidates

    def at(self, index: Integers) -> "RequestBatch":
        """Select rows."""
        return RequestBatch(
            window=select_rows(self.window, index),
            modes=self.modes[index],
            sample=self.sample[index],
            target_returns=self.target_returns[index],
            candidates=self.candidates[index],
        )


class Policy:
    """A Planner without state between two calls. `config` may change how to plan, but must have the
    weights' own settings under model and returns."""

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

    @property
    def window(self) -> int:
        return self.config.model.window

    @property
    def horizon(self) -> int:
        return self.config.planner.horizon

    def decide(self, window: Window, *, explore: bool = False) -> Decision:
        """A row's decision does not depend on the other rows."""
        return self.answer([PlanRequest(window=window, explore=explore)])[0]

    def answer(self, requests: Sequence[PlanRequest]) -> list[Decision]:
        """Check several requests and compute them as one batch, each in its own mode."""
        for request in requests:
            self.check(request)
        return self.compute(requests)

    def check(self, request: PlanRequest) -> None:
        """Refuse what these weights cannot answer."""
        check_request(
            request,
            length=self.config.model.window,
            state_size=self.weights.state_size,
            action_size=self.weights.action_size,
        )

    def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
        """`answer` for requests that have been checked; MemoryError if the batch is too large.

        One proposal per `now` serves all forward modes. Actions are clipped to [-1, 1].
        """
        batch = self._concatenate(requests)
        rows = len(batch.modes)
        decision = Decision(
            actions=np.empty((rows, self.weights.action_size), np.float32),
            target_returns=batch.target_returns,
            utilities=np.full(rows, np.nan, np.float32),
            effective_candidates=np.full(rows, np.nan, np.float32),
            utility_std=np.full(rows, np.nan, np.float32),
            version=self.weights.version,
        )
        with memory_errors(), torch.inference_mode():
            for now in np.unique(batch.window.now):
                at_now = np.flatnonzero(batch.window.now == now)
                for index, output in self._outputs(batch.at(at_now)):
                    _write(decision, at_now[index], output)
        return split_decision(decision, [len(request.window) for request in requests])

    def target_returns(
        self,
        steps: Integers,
        *,
        explore: bool,
        ratio: float | None = None,
        target_remaining: float | None = None,
    ) -> Floats:
        """The return-to-go to ask the policy for at each absolute step. `target_remaining`, a sum
        of rewards, replaces the configured rule."""
        if target_remaining is not None:
            return (target_remaining * self.weights.return_rule.scale(steps)).astype(np.float32)
        config, envelope = self.config.conditioning, self.weights.envelope
        rule = config.exploration if explore else config.evaluation
        if ratio is None:
            ratio = config.exploration_ratio if explore else config.evaluation_ratio
        factor = np.float32(ratio)
        if rule == "envelope":
            return factor * envelope[np.minimum(steps, len(envelope) - 1)]
        low, high = self.weights.return_range
        target = low + (high - low) * factor if explore else factor * high
        return np.full(len(steps), target, np.float32)

    def _concatenate(self, requests: Sequence[PlanRequest]) -> RequestBatch:
        planner = self.config.planner
        sizes = [len(request.window) for request in requests]
        modes = [request.mode or planner.mode for request in requests]
        sample = [
            not request.mean
            and (planner.explore_by if request.explore else planner.evaluate_by) == "sample"
            for request in requests
        ]
        target_returns = [
            np.full(size, np.nan, np.float32)
            if mode in BACKWARD
            else self.target_returns(
                request.window.steps,
                explore=request.explore,
                ratio=request.ratio,
                target_remaining=request.target_remaining,
            )
            for request, mode, size in zip(requests, modes, sizes, strict=True)
        ]
        candidates = [request.candidates or planner.candidates for request in requests]
        return RequestBatch(
            window=concatenate([request.window for request in requests]),
            modes=np.repeat(modes, sizes),
            sample=np.repeat(sample, sizes),
            target_returns=np.concatenate(target_returns),
            candidates=np.repeat(candidates, sizes),
        )

    def _outputs(self, rows: RequestBatch) -> Iterator[tuple[Integers, Tensor | PlanOutput]]:
        """Plan for rows at the same `now`, by mode and number of candidates. Yields row indices and
        their actions, or the output of forward planning."""
        for mode in BACKWARD:
            if len(index := np.flatnonzero(rows.modes == mode)):
                actions = plan_backward(
                    self._model,
                    self._normaliser,
                    self.config,
                    self._batch(rows.at(index)),
                    single_mask=mode == "goal-mask",
                )
                yield index, actions
        forward = np.flatnonzero(~np.isin(rows.modes, BACKWARD))
        if not len(forward):
            return
        rows = rows.at(forward)
        proposal = propose(self._model, self._normaliser, self.config, self._batch(rows))
        for mode in FORWARD:
            for index in _same_shape(rows, mode):
                output = self._planned(rows.at(index), proposal.at(index), mode)
                yield forward[index], output

    def _planned(
        self, rows: RequestBatch, proposal: Proposal, mode: Literal["rcbc"] | Guidance
    ) -> Tensor | PlanOutput:
        sample = torch.as_tensor(rows.sample, device=self._device)
        count = 1 if mode == "rcbc" else int(rows.candidates[0])
        noise, chance = self._noise(rows.window, (count, *proposal.mu.shape[1:]))
        if mode == "rcbc":  # the proposal's median, or one draw from it
            scale = sample.float()[:, None, None, None]
            return draw_candidates(proposal, noise, scale)[:, 0, 0]
        return plan(
            self._model,
            self._critic,
            self._normaliser,
            self.config,
            self._batch(rows),
            mode,
            noise=noise,
            chance=chance,
            sample=sample,
            proposal=proposal,
        )

    def _batch(self, rows: RequestBatch) -> PlanningBatch:
        window = rows.window
        return PlanningBatch(
            states=torch.as_tensor(window.states, device=self._device),
            actions=torch.as_tensor(window.actions, device=self._device),
            now=int(window.now[0]),
            steps=torch.as_tensor(window.steps, device=self._device),
            target_returns=torch.as_tensor(rows.target_returns, device=self._device),
            max_episode_steps=self.weights.max_episode_steps,
        )

    def _noise(self, window: Window, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Noise [E, N, h, A] and chance [E], drawn from the stream of each episode and step."""
        noise = np.empty((len(window), *shape), np.float32)
        chance = np.empty(len(window), np.float32)
        stream = ReusableStream()
        keys = zip(window.seeds.tolist(), window.steps.tolist(), strict=True)
        for row, (seed, step) in enumerate(keys):
            rng = stream.at(seed, step, PLAN)
            rng.standard_normal(dtype=np.float32, out=noise[row])
            chance[row] = rng.random(dtype=np.float32)
        device = self._device
        return torch.as_tensor(noise, device=device), torch.as_tensor(chance, device=device)


def _same_shape(rows: RequestBatch, mode: str) -> Iterator[Integers]:
    """Yield the row indices of a mode, grouped by number of candidates."""
    in_mode = rows.modes == mode
    counts = np.where(mode == "rcbc", 1, rows.candidates)  # rcbc always draws one
    for count in np.unique(counts[in_mode]):
        yield np.flatnonzero(in_mode & (counts == count))


def _write(decision: Decision, index: Integers, output: Tensor | PlanOutput) -> None:
    """Write the output for some rows into a decision."""
    actions = output if isinstance(output, Tensor) else output.actions
    decision.actions[index] = actions.clamp(-1, 1).cpu().numpy()
    if isinstance(output, PlanOutput):
        weighting = output.weighting
        mean = (weighting.weights * output.utilities).sum(dim=-1)
        decision.utilities[index] = mean.cpu().numpy()
        decision.effective_candidates[index] = weighting.effective_candidates.cpu().numpy()
        decision.utility_std[index] = weighting.utility_std.cpu().numpy()
