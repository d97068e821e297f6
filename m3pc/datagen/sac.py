"""Soft actor-critic (Haarnoja et al. 2018), which trains the policies that record data sets.

The learner is given complete episodes and never steps an environment. It has no global state:
learners with the same seed, settings and episodes are equal to the bit (one thread, one machine).
B batch, S state, A action; 2 is the pair of critics.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from m3pc.model.critic import stacked_forward, stacked_parameters
from m3pc.model.squashed_gaussian import draw
from m3pc.types import LOG_STD_RANGE, Episode, Floats

LinearLayer = tuple[Floats, Floats]  # weight [out, in], bias [out]


@dataclass(frozen=True, slots=True, kw_only=True)
class SACConfig:
    """Defaults that are small enough for one CPU thread."""

    hidden: tuple[int, ...] = (128, 128)
    batch: int = 128  # transitions in an update
    discount: float = 0.99
    rate: float = 1e-3  # learning rate of actor and critics
    temperature: float = 1.0  # initial weight of entropy, in reward per nat
    temperature_rate: float = 1e-3  # learning rate of the temperature; 0 keeps it constant
    target_rate: float = 0.02  # share of the way from targets to critics, per update
    capacity: int = 1_000_000  # transitions kept; the oldest are overwritten


@dataclass(frozen=True, slots=True)
class Transitions:
    states: Tensor  # [B, S]
    actions: Tensor  # [B, A]
    rewards: Tensor  # [B]
    continues: Tensor  # [B] 0 where the episode terminated, else 1
    next_states: Tensor  # [B, S]


class SAC:
    """Actor, twin critics with their targets, temperature. `add` episodes, then `update`."""

    def __init__(
        self, state_size: int, action_size: int, settings: SACConfig, *, seed: int
    ) -> None:
        self.settings = settings
        self.updates = 0  # gradient updates done: the version of the policy
        self.ring = ReplayRing(state_size, action_size, settings.capacity)
        self._action_size = action_size
        self._rng = np.random.default_rng(seed)
        self._noise = torch.Generator().manual_seed(seed)
        actor_sizes = (state_size, *settings.hidden, 2 * action_size)
        critic_sizes = (state_size + action_size, *settings.hidden, 1)
        self.actor = _parameters(actor_sizes, (), self._noise)
        self.critics = _parameters(critic_sizes, (2,), self._noise)
        self.targets = [parameter.detach().clone() for parameter in self.critics]
        self.log_temperature = torch.tensor(math.log(settings.temperature), requires_grad=True)
        self._actor_adam = torch.optim.Adam(self.actor, settings.rate, fused=True)
        self._critic_adam = torch.optim.Adam(self.critics, settings.rate, fused=True)
        self._temperature_adam = torch.optim.Adam(
            [self.log_temperature], settings.temperature_rate, fused=True
        )

    def add(self, episode: Episode) -> None:
        self.ring.add(episode)

    def update(self, count: int) -> None:
        """`count` gradient updates, each on a new batch drawn uniformly."""
        for _ in range(count):
            batch = self.ring.sample(self.settings.batch, self._rng)
            self._update_critics(batch)
            self._update_actor(batch.states)
            self.updates += 1

    def layers(self) -> list[LinearLayer]:
        """The actor's hidden layers, then the heads of mean and log std. The arrays are views: they
        change with the actor."""
        arrays = [parameter.detach().numpy() for parameter in self.actor]
        *hidden, (weight, bias) = zip(arrays[::2], arrays[1::2], strict=True)
        heads = zip(np.split(weight, 2), np.split(bias, 2), strict=True)
        return [*hidden, *heads]

    def _act(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Actions drawn from the policy [B, A] and their log densities [B]."""
        mean, log_std = forward_actor(self.actor, states)
        noise = torch.randn(mean.shape, generator=self._noise)
        return squash(mean, log_std, noise)

    def _update_critics(self, batch: Transitions) -> None:
        with torch.no_grad():
            next_actions, log_probs = self._act(batch.next_states)
            values = forward_critics(self.targets, batch.next_states, next_actions).amin(dim=0)
            values -= self.log_temperature.exp() * log_probs
            q_targets = batch.rewards + self.settings.discount * batch.continues * values
        errors = forward_critics(self.critics, batch.states, batch.actions) - q_targets
        self._critic_adam.zero_grad()
        torch.autograd.backward(errors.square().mean(dim=1).sum())
        self._critic_adam.step()
        with torch.no_grad():
            for target, parameter in zip(self.targets, self.critics, strict=True):
                target.lerp_(parameter, self.settings.target_rate)

    def _update_actor(self, states: Tensor) -> None:
        actions, log_probs = self._act(states)
        values = forward_critics(self.critics, states, actions).amin(dim=0)
        temperature = self.log_temperature.exp().detach()
        self._actor_adam.zero_grad()
        loss = (temperature * log_probs - values).mean()
        torch.autograd.backward(loss, inputs=self.actor)  # without the critics' gradients
        self._actor_adam.step()
        # Target entropy: -A nats. d/d(log temperature) of log_temperature * (entropy - target).
        self.log_temperature.grad = self._action_size - log_probs.detach().mean()
        self._temperature_adam.step()


class ReplayRing:
    """The last `capacity` transitions, one row each, so that a batch is a single gather."""

    def __init__(self, state_size: int, action_size: int, capacity: int) -> None:
        self._widths = [state_size, action_size, 1, 1, state_size]
        self._rows = np.empty((capacity, sum(self._widths)), np.float32)
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, len(self._rows))

    def add(self, episode: Episode) -> None:
        """Add every transition of an episode. Only termination, not truncation, ends the future."""
        continues = np.ones(len(episode), np.float32)
        continues[-1] = not episode.terminated
        rows = np.column_stack(
            (episode.states[:-1], episode.actions, episode.rewards, continues, episode.states[1:])
        )
        slots = np.arange(self._added, self._added + len(rows)) % len(self._rows)
        self._rows[slots[-len(self._rows) :]] = rows[-len(self._rows) :]
        self._added += len(rows)

    def sample(self, batch: int, rng: np.random.Generator) -> Transitions:
        rows = torch.from_numpy(self._rows.take(rng.integers(len(self), size=batch), axis=0))
        states, actions, rewards, continues, next_states = torch.split(rows, self._widths, dim=1)
        return Transitions(states, actions, rewards[:, 0], continues[:, 0], next_states)


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions [..., A] and their log densities [...]."""
    actions, log_densities = draw(mean, log_std, noise)
    return actions, log_densities.sum(dim=-1)


def forward_actor(parameters: Sequence[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log standard deviation [B, A] before the tanh."""
    *hidden, weight, bias = parameters
    x = states
    for hidden_weight, hidden_bias in zip(hidden[::2], hidden[1::2], strict=True):
        x = functional.linear(x, hidden_weight, hidden_bias).relu()
    mean, log_std = functional.linear(x, weight, bias).chunk(2, dim=-1)
    return mean, log_std.clamp(*LOG_STD_RANGE)


def forward_critics(parameters: Sequence[Tensor], states: Tensor, actions: Tensor) -> Tensor:
    """Both critics: [2, B]."""
    return stacked_forward(parameters, torch.cat((states, actions), dim=-1))


def _parameters(
    sizes: Sequence[int], stack: tuple[int, ...], generator: torch.Generator
) -> list[Tensor]:
    return [initial.requires_grad_() for initial in stacked_parameters(sizes, stack, generator)]
