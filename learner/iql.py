"""Updates of the critic: implicit Q-learning, optionally after a regression on observed returns."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.optimiser import checked_tensor, optimiser_state, require_finite, restore_optimiser
from learner.process_group import ProcessGroup
from m3pc.config.schema import CriticConfig
from m3pc.model.critic import Critic, EnsembleMLP
from m3pc.types import TransitionBatch


class CriticLearner:
    """The critic, the target networks of its two Q functions, and Adam."""

    def __init__(
        self, critic: Critic, config: CriticConfig, group: ProcessGroup | None = None
    ) -> None:
        self.critic, self.config, self._group = critic, config, group or ProcessGroup()
        self.targets = [parameter.detach().clone() for parameter in critic.q.parameters()]
        self._named = dict(critic.named_parameters())
        self._adam = torch.optim.Adam(self._named.values(), config.lr, fused=True)

    def update(self, batch: TransitionBatch[NDArray[Any]]) -> dict[str, float]:
        """Move V towards an expectile of target Q, Q towards reward and next V, targets towards Q.

        The next V is computed before V's step and the two losses share no parameters, so one
        backward pass and one step of Adam equal the two steps in turn.
        """
        rows = self._on_device(batch)
        critic, config = self.critic, self.config
        states, next_states = critic.normalise(rows.states), critic.normalise(rows.next_states)
        pairs = torch.cat([states, rows.actions], dim=-1)
        with torch.no_grad():
            next_values = critic.v(next_states)[0]
            goes_on = 1 - rows.terminals if config.terminals else torch.ones_like(rows.terminals)
            q_targets = rows.rewards + config.discount * goes_on * next_values
            min_q = torch.func.functional_call(critic.q, self._target_state(), pairs).amin(dim=0)
        value_loss = expectile_loss(min_q - critic.v(states)[0], config.expectile)
        q_loss = (critic.q(pairs) - q_targets).square().mean()
        numbers = self._step(value_loss, q_loss)
        with torch.no_grad():
            torch._foreach_lerp_(self.targets, list(critic.q.parameters()), config.tau)
        return numbers

    def regress(self, batch: TransitionBatch[NDArray[Any]]) -> dict[str, float]:
        """Move Q and V towards the observed discounted return; the targets become equal to Q."""
        rows = self._on_device(batch)
        value_loss = (self.critic.value(rows.states) - rows.returns).square().mean()
        q_loss = (self.critic.q_values(rows.states, rows.actions) - rows.returns).square().mean()
        numbers = self._step(value_loss, q_loss)
        with torch.no_grad():
            torch._foreach_copy_(self.targets, list(self.critic.q.parameters()))
        return numbers

    def state(self) -> dict[str, Tensor]:
        """The target networks and the moments of Adam."""
        targets = {f"target.{name}": x for name, x in self._target_state().items()}
        return targets | optimiser_state(self._adam, self._named)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        for name, target in self._target_state().items():
            target.copy_(checked_tensor(state, f"target.{name}", target))
        restore_optimiser(self._adam, self._named, state)

    def target_twins(self, states: Tensor, actions: Tensor) -> Tensor:
        """The two target networks on raw states: [2, B]."""
        pairs = torch.cat([self.critic.normalise(states), actions], dim=-1)
        targets: Tensor = torch.func.functional_call(self.critic.q, self._target_state(), pairs)
        return targets

    def _target_state(self) -> dict[str, Tensor]:
        q: EnsembleMLP = self.critic.q
        return dict(zip((name for name, _ in q.named_parameters()), self.targets, strict=True))

    def _step(self, value_loss: Tensor, q_loss: Tensor) -> dict[str, float]:
        self._adam.zero_grad()
        torch.autograd.backward(value_loss + q_loss)
        gradients = [x.grad for x in self._named.values() if x.grad is not None]
        self._group.average(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        # The only wait for the device: losses and gradient must be finite before the step.
        losses = {"value_loss": value_loss.item(), "q_loss": q_loss.item()}
        numbers = self._group.all_reduce(losses)  # all learners go on, or none
        require_finite(sum(numbers.values()), "the critic's loss", "critic.lr")
        require_finite(norm.item(), "the critic's gradient", "critic.lr")
        self._adam.step()
        return numbers

    def _on_device(self, batch: TransitionBatch[NDArray[Any]]) -> TransitionBatch[Tensor]:
        device = self.critic.state_mean.device
        return batch.map(lambda x: self._group.shard(torch.as_tensor(x).to(device)))


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """Mean of squares, weighted by `expectile` above 0 and by `1 - expectile` below."""
    weight = torch.where(error > 0, expectile, 1 - expectile)
    return (weight * error.square()).mean()
