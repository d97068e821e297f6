"""Compares a checkpoint's outputs with those that the paper's code gave for the same inputs."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.iql import CriticLearner
from learner.losses import trajectory_losses
from m3pc.config.overrides import replace
from m3pc.interop.released_files import read_npz
from m3pc.model import checkpoint
from m3pc.model.checkpoint import Checkpoint
from m3pc.model.masks import Mask, visible
from m3pc.model.normalisation import Tokens
from m3pc.types import InputError, TransitionBatch
from planner.forward import Guidance, PlanningBatch, imagine, score, softmax_weights

NETWORK, CHOICE = 1e-5, 5e-4  # absolute tolerances
UTILITY, LOSS = 1e-5, 1e-4  # tolerances relative to the largest recorded number

PATTERNS = {
    "rcbc": "policy",
    "fd": "dynamics",
    "id": "inverse",
    "pi": "path",
}  # released name: our name
OUTPUTS = {name: name for name in ("states", "rewards", "returns", "mu")} | {"log_std": "log_sigma"}
GUIDES: Mapping[str, Guidance] = {"q": "q", "rtg": "m"}
TERMS = ("states", "actions", "rewards", "returns", "nll", "entropy", "total")


@dataclass(frozen=True, slots=True)
class ComparedItem:
    """One comparison: the largest error, and the allowed one."""

    name: str
    error: float  # NaN if a number is NaN
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


def verify(path: Path, golden: Path) -> list[ComparedItem]:
    """Compare every recorded number that the checkpoint can compute. NaN in the file is a miss."""
    subject = checkpoint.read(path)
    recording = RecordedOutputs(file=golden.name, arrays=read_npz(golden))
    broken = recording.not_finite()
    if broken:
        return [ComparedItem(f"{name} is finite", math.nan, 0.0) for name in broken]
    comparison = OutputComparison(subject, recording)
    with torch.no_grad():
        items = [
            *comparison.masks(),
            *comparison.network(),
            *comparison.plans(),
            *comparison.losses(),
        ]
    items += comparison.critic_update()
    if not items:
        raise InputError(f"{golden} has no outputs to compare with; give a recording of outputs")
    return items


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutputs:
    """Arrays of a golden file, checked for their shapes when they are used."""

    file: str
    arrays: Mapping[str, NDArray[Any]]

    def not_finite(self) -> list[str]:
        return [
            name
            for name, array in self.arrays.items()
            if array.dtype.kind == "f" and not np.isfinite(array).all()
        ]

    def named(self, pattern: str) -> list[str]:
        """Return the text of the pattern's group for each array name that matches."""
        matches = (re.fullmatch(pattern, name, re.ASCII) for name in self.arrays)
        return [match[1] for match in matches if match]

    def take(self, name: str, *shape: int | None, kinds: str = "fiu") -> NDArray[Any]:
        """An array of numbers; None in the expected shape stands for any size except 0."""
        if name not in self.arrays:
            raise InputError(f"{self.file} has no {name}; give a complete recording")
        array = self.arrays[name]
        fits = len(shape) == array.ndim and all(
            size > 0 and expected in (None, size)
            for size, expected in zip(array.shape, shape, strict=True)
        )
        if not fits or array.dtype.kind not in kinds:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise InputError(
                f"{self.file}: {name} is {array.dtype} {list(array.shape)}, expected [{sizes}] "
                "for this checkpoint; give one of the same sizes"
            )
        return array

    def tensor(self, name: str, *shape: int | None) -> Tensor:
        return torch.from_numpy(self.take(name, *shape).astype(np.float32))

    def numbers(self, name: str, *shape: int) -> list[float]:
        """Return settings in their recorded precision, not rounded to float32."""
        settings: list[float] = self.take(name, *shape).astype(np.float64).reshape(-1).tolist()
        return settings


class OutputComparison:
    """A checkpoint and the recording that it is compared with."""

    def __init__(self, subject: Checkpoint, recording: RecordedOutputs) -> None:
        weights = subject.weights
        self.subject, self.weights, self.recording = subject, weights, recording
        self.model, self.critic = weights.model(), weights.critic()
        self.normaliser = weights.normaliser()
        self.length = weights.config.model.window
        self.sizes = {"states": weights.state_size, "actions": weights.action_size}
        rows = len(recording.take("input_states", None, self.length, weights.state_size))
        self.inputs = {
            name: recording.tensor(f"input_{name}", rows, self.length, self.sizes.get(name, 1))
            for name in Tokens._fields
        }
        self.tokens = Tokens(
            states=self.normaliser.states.encode(self.inputs["states"]),
            actions=self.inputs["actions"],
            rewards=self.normaliser.rewards.encode(self.inputs["rewards"]),
            returns=self.normaliser.returns.encode(self.inputs["returns"]),
        )

    def masks(self) -> Iterator[ComparedItem]:
        """The error is the number of tokens in which the two masks differ."""
        for theirs, ours in PATTERNS.items():
            for now in self.recording.named(rf"visible_{theirs}(\d+)"):
                expected = visible(ours, now=self._now(now), length=self.length)
                differ = int((self._mask(f"{theirs}{now}") != expected).sum())
                yield ComparedItem(f"mask {theirs}{now}", float(differ), 0.0)

    def network(self) -> Iterator[ComparedItem]:
        """The largest error of the five outputs, for each mask."""
        for name in self.recording.named(r"visible_(\w+)"):
            prediction = self.model(self.tokens, self._mask(name))
            errors = []
            for theirs, ours in OUTPUTS.items():
                output = getattr(prediction, ours)
                expected = self.recording.take(f"out_{name}_{theirs}", *output.shape)
                errors.append(_error(output, expected))
            worst = float(np.max(errors))  # NaN if any is, unlike max()
            yield ComparedItem(f"network {name}", worst, NETWORK)

    def plans(self) -> Iterator[ComparedItem]:
        """Utilities, weights and actions of both guides on the first window."""
        for text in self.recording.named(r"plan(\d+)_candidates"):
            now = self._now(text)
            candidates = self.recording.tensor(
                f"plan{text}_candidates", None, self.length - now, self.sizes["actions"]
            )[None]
            batch = PlanningBatch(
                states=self.inputs["states"][:1],
                actions=self.inputs["actions"][:1],
                now=now,
                steps=torch.tensor([now]),
                target_returns=torch.full((1,), torch.nan),  # candidates are given
                max_episode_steps=self.weights.max_episode_steps,
            )
            for theirs, guide in GUIDES.items():
                name, expected = f"plan {text} {theirs}", f"plan{text}_{theirs}"
                yield from self._plan(name, expected, batch, candidates, guide)

    def _plan(
        self, name: str, recorded: str, batch: PlanningBatch, candidates: Tensor, guide: Guidance
    ) -> Iterator[ComparedItem]:
        discount, lam = self.recording.numbers("plan_discount_lambda", 2)
        [xi] = self.recording.numbers(f"{recorded}_xi")
        settings = {"planner.discount": discount, "planner.lam": lam}
        temperature = {f"planner.{guide}.inverse_temperature": xi}
        config = replace(self.weights.config, settings | temperature)
        imagined = imagine(self.model, self.normaliser, config.planner, batch, candidates, guide)
        utilities = score(imagined, candidates, batch, config, guide, self.critic.min_q)
        standardised = config.planner.utility == "standardised"
        weights = softmax_weights(
            utilities, inverse_temperature=xi, standardised=standardised
        ).weights
        action = torch.einsum("en,ena->ea", weights, candidates[:, :, 0])
        expected = {
            part: self.recording.take(f"{recorded}_{part}", size)
            for part, size in (
                ("utility", candidates.shape[1]),
                ("weights", candidates.shape[1]),
                ("action", candidates.shape[3]),
            )
        }
        yield ComparedItem(f"{name} utility", _relative(utilities[0], expected["utility"]), UTILITY)
        yield ComparedItem(f"{name} weights", _error(weights[0], expected["weights"]), CHOICE)
        yield ComparedItem(f"{name} action", _error(action[0], expected["action"]), CHOICE)

    def losses(self) -> Iterator[ComparedItem]:
        """Every term of the pretraining loss, for each mask."""
        for name in self.recording.named(r"loss_(\w+)_total"):
            mask = self._mask(name)
            noise = self.recording.tensor("loss_entropy_noise", *self.inputs["actions"].shape)
            [alpha] = self.recording.numbers("loss_temperature")
            losses = trajectory_losses(
                self.model(self.tokens, mask),
                self.tokens,
                mask,
                noise,
                alpha=alpha,
                loss=self.weights.config.loss,
                entropy=self.weights.config.entropy,
            )
            for term in TERMS:
                expected = self.recording.take(f"loss_{name}_{term}")
                yield ComparedItem(f"loss {name} {term}", _relative(losses[term], expected), LOSS)

    def critic_update(self) -> Iterator[ComparedItem]:
        """Losses of one critic update, and Q, target Q and V after it."""
        if not self.recording.named(r"(iql_\w+)"):
            return
        names = ("critic.discount", "critic.expectile", "critic.tau", "critic.lr")
        settings = dict(zip(names, self.recording.numbers("iql_settings", 4), strict=True))
        config = replace(self.weights.config, settings)
        learner = CriticLearner(self.weights.critic(), config.critic)
        learner.restore(self._targets(learner))
        batch = self._transitions()
        losses = learner.update(batch)
        for name, loss in losses.items():
            expected = self.recording.take(f"iql_{name}")
            yield ComparedItem(f"iql {name}", _relative(torch.tensor(loss), expected), LOSS)
        count = min(len(self.recording.take("iql_after_q", None)), len(batch.states))
        states, actions = (torch.from_numpy(x[:count]) for x in (batch.states, batch.actions))
        with torch.no_grad():
            after = {
                "q": learner.critic.min_q(states, actions),
                "q_target": learner.target_twins(states, actions).amin(dim=0),
                "v": learner.critic.value(states),
            }
        for name, numbers in after.items():
            expected = self.recording.take(f"iql_after_{name}", count)
            yield ComparedItem(f"iql after {name}", _relative(numbers, expected), LOSS)

    def _targets(self, learner: CriticLearner) -> dict[str, Tensor]:
        """The checkpoint's target networks, with a fresh optimiser state."""
        training = self.subject.training
        targets = {}
        for name, fresh in learner.state().items():
            target = training.get(f"critic.{name}")
            if target is None or target.shape != fresh.shape:
                raise InputError(f"{self.subject.path} holds no critic.{name} to update from")
            targets[name] = target
        return targets

    def _transitions(self) -> TransitionBatch[NDArray[Any]]:
        take, (states, actions) = self.recording.take, self.sizes.values()
        rows = len(take("iql_states", None, states))
        columns = {
            "states": take("iql_states", rows, states),
            "actions": take("iql_actions", rows, actions),
            "rewards": take("iql_rewards", rows, 1)[:, 0],
            "next_states": take("iql_next_states", rows, states),
            "terminals": take("iql_terminals", rows, 1)[:, 0],
            "returns": np.zeros(rows),
        }
        return TransitionBatch(**{name: x.astype(np.float32) for name, x in columns.items()})

    def _mask(self, name: str) -> Mask:
        return self.recording.take(f"visible_{name}", len(Tokens._fields), self.length, kinds="b")

    def _now(self, text: str) -> int:
        now = int(text)
        if now >= self.length:
            raise InputError(
                f"{self.recording.file} asks at step {now} of a window of {self.length}; "
                "give one of the same sizes"
            )
        return now


def _error(actual: Tensor, expected: NDArray[Any]) -> float:
    """The largest absolute difference; NaN if any number is NaN."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = actual.double() - torch.from_numpy(expected.astype(np.float64))
    return float(difference.abs().max())


def _relative(actual: Tensor, expected: NDArray[Any]) -> float:
    """The error divided by the largest expected number; undivided if all of them are 0."""
    return _error(actual, expected) / (float(np.abs(expected).max()) or 1.0)
