"""Finetuning: the model and its critic learn on from logged and collected episodes."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from learner.iql import CriticLearner
from learner.optimiser import LearningRate, online_rate
from learner.process_group import ProcessGroup
from learner.trajectory import TrajectoryLearner
from m3pc.config.overrides import replace
from m3pc.config.schema import Config
from m3pc.model.weights import Weights, gather_tensors, with_prefix
from m3pc.types import Floats, TransitionBatch, WindowBatch


class OnlineLearner:
    """Update k is a function of k, its batches and the state before."""

    def __init__(
        self,
        weights: Weights,
        training: Mapping[str, Tensor],
        config: Config,
        group: ProcessGroup | None = None,
    ) -> None:
        """`training` is the state of pretraining, or empty. The critic continues from this state,
        and so does alpha if entropy.alpha_online is `keep`; AdamW starts anew."""
        device = config.compute.device
        self._initial, self.config = weights, config
        self.model = TrajectoryLearner(
            weights.model(device),
            weights.normaliser(device),
            _with_online_losses(config),
            rate=LearningRate("online.lr", partial(online_rate, config.online)),
            group=group,
        )
        self.critic = CriticLearner(weights.critic(device), config.critic, group)
        if config.entropy.alpha_online == "keep" and "model.log_alpha" in training:
            self.model.restore({"log_alpha": training["model.log_alpha"]})
        if critic_state := with_prefix(training, "critic."):
            self.critic.restore(critic_state)

    def update(
        self,
        number: int,
        windows: WindowBatch[NDArray[Any]],
        transitions: Iterable[TransitionBatch[NDArray[Any]]],
    ) -> dict[str, float]:
        """Update the critic on each batch of transitions, then the model once.

        A loss that is not finite raises DivergedError before its step.
        """
        numbers: dict[str, float] = {}
        step = self.critic.update if self.config.critic.online == "iql" else self.critic.regress
        for batch in transitions:
            numbers |= step(batch)
        return numbers | self.model.update(number, windows)

    def weights(self, version: int, *, envelope: Floats) -> Weights:
        """A copy of everything that a planner needs; `version` is a packed Version."""
        initial = self._initial
        arrays = {n: x.numpy() for n, x in with_prefix(initial.tensors, "normaliser.").items()}
        return Weights(
            version=version,
            config=self.config,
            state_size=initial.state_size,
            action_size=initial.action_size,
            max_episode_steps=initial.max_episode_steps,
            env=initial.env,
            tensors=gather_tensors(
                self.model.model,
                self.critic.critic,
                arrays=arrays,
                envelope=envelope,
                return_range=initial.return_range,
            ),
        )

    def state(self) -> dict[str, Tensor]:
        """The training state of model and critic, without their weights."""
        return {f"model.{name}": x for name, x in self.model.state().items()} | {
            f"critic.{name}": x for name, x in self.critic.state().items()
        }

    def restore(self, weights: Weights, training: Mapping[str, Tensor]) -> None:
        """Continue from what `weights` and `state` returned."""
        self.model.model.load_state_dict(with_prefix(weights.tensors, "model."))
        self.critic.critic.load_state_dict(with_prefix(weights.tensors, "critic."))
        self.model.restore(with_prefix(training, "model."))
        self.critic.restore(with_prefix(training, "critic."))


def _with_online_losses(config: Config) -> Config:
    """Drop the terms of the loss that are not minimised online."""
    if config.loss.online == "all":
        return config
    return replace(
        config,
        {
            "loss.weights.rewards": 0.0,
            "loss.weights.returns": 0.0,
            "loss.visible_action_mse": False,
        },
    )
