"""The model and its critic while both go on learning from what is collected."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from learner.iql import CriticLearner
from learner.optimiser import online_rate
from learner.process_group import ProcessGroup
from learner.trajectory import TrajectoryLearner
from m3pc.config.overrides import replace
from m3pc.config.schema import Config
from m3pc.model.weights import Weights, gather, part
from m3pc.types import Floats, TransitionBatch, WindowBatch


class OnlineLearner:
    """Starts from weights; update k is a function of what was before it, its batches and k."""

    def __init__(
        self,
        weights: Weights,
        training: Mapping[str, Tensor],
        config: Config,
        group: ProcessGroup | None = None,
    ) -> None:
        """`training` is what pretraining kept beside the weights, or nothing. Of it the critic's
        state goes on, and alpha where entropy.alpha_online says so; AdamW starts anew."""
        device = config.compute.device
        self._first, self.config = weights, config
        self.model = TrajectoryLearner(
            weights.model(device),
            weights.normaliser(device),
            _online(config),
            rate=partial(online_rate, config.online),
            group=group,
        )
        self.critic = CriticLearner(weights.critic(device), config.critic, group)
        if config.entropy.alpha_online == "keep" and "model.log_alpha" in training:
            self.model.restore({"log_alpha": training["model.log_alpha"]})
        if before := part(training, "critic."):
            self.critic.restore(before)

    def update(
        self,
        number: int,
        pieces: WindowBatch[NDArray[Any]],
        transitions: Iterable[TransitionBatch[NDArray[Any]]],
    ) -> dict[str, float]:
        """The critic on each batch of transitions, then the model once.

        A loss that is not finite raises DivergedError before it is stepped on.
        """
        numbers: dict[str, float] = {}
        step = self.critic.update if self.config.critic.online == "iql" else self.critic.regress
        for batch in transitions:
            numbers |= step(batch)
        return numbers | self.model.update(number, pieces)

    def weights(self, version: int, *, envelope: Floats) -> Weights:
        """A copy of all that a plan needs, now."""
        first = self._first
        arrays = {n: x.numpy() for n, x in part(first.tensors, "normaliser.").items()}
        return Weights(
            version=version,
            config=self.config,
            state_size=first.state_size,
            action_size=first.action_size,
            max_episode_steps=first.max_episode_steps,
            env=first.env,
            tensors=gather(
                self.model.model,
                self.critic.critic,
                arrays=arrays,
                envelope=envelope,
                return_range=first.return_range,
            ),
        )

    def state(self) -> dict[str, Tensor]:
        """All that the next update needs beside the weights."""
        return {f"model.{name}": x for name, x in self.model.state().items()} | {
            f"critic.{name}": x for name, x in self.critic.state().items()
        }

    def restore(self, weights: Weights, training: Mapping[str, Tensor]) -> None:
        """To where `weights` and `state` were taken."""
        self.model.model.load_state_dict(part(weights.tensors, "model."))
        self.critic.critic.load_state_dict(part(weights.tensors, "critic."))
        self.model.restore(part(training, "model."))
        self.critic.restore(part(training, "critic."))


def _online(config: Config) -> Config:
    """With the losses that are used online."""
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
