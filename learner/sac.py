"""Soft actor-critic (Haarnoja et al. 2018), lean: it trains the policies that record data sets.

The learner is fed whole episodes and never sees an environment. Nothing here is global: learners
with the same seed, settings and episodes are equal to the bit (one BLAS thread, one machine).
Plain numpy with gradients written out by hand: on networks this small a framework's own time per
operation exceeds the arithmetic, and this is several times faster than torch with autograd.
B batch, L steps of an episode, S state, A action, K networks side by side, P parameters of all K.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from m3pc.types import Episode, Floats

LOG_STD_RANGE = (-20.0, 2.0)  # as in the SAC implementation that recorded D4RL
BETAS = (0.9, 0.999)  # of Adam
EPSILON = 1e-8  # of Adam
Layer = tuple[Floats, Floats]  # weight [out, in], bias [out]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Small enough for one CPU thread."""

    hidden: tuple[int, ...] = (128, 128)
    batch: int = 128  # transitions an update sees
    discount: float = 0.99
    rate: float = 1e-3  # learning rate of actor and critics
    temperature: float = 1.0  # at the start: reward units that one nat of entropy is worth
    temperature_rate: float = 1e-3  # 0 keeps the temperature as it is
    target_rate: float = 0.005  # part of the critics that moves into their targets, per update
    actor_period: int = 1  # critic updates per actor update
    capacity: int = 1_000_000  # transitions kept; the oldest are overwritten


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    states: Floats  # [B, S]
    actions: Floats  # [B, A]
    rewards: Floats  # [B]
    goes_on: Floats  # [B] 0 where the task ended, else 1
    next_states: Floats  # [B, S]


class SAC:
    """Actor, twin critics with their targets, temperature. `add` episodes, then `update`."""

    def __init__(self, state_size: int, action_size: int, settings: Settings, *, seed: int) -> None:
        self.settings = settings
        self.updates = 0  # gradient updates done: the version of the policy
        self.ring = Ring(state_size, action_size, settings.capacity)
        self._sizes = state_size, action_size
        self._rng = np.random.default_rng(seed)
        actor_sizes = (state_size, *settings.hidden, 2 * action_size)
        critic_sizes = (state_size + action_size, *settings.hidden, 1)
        self.actor = Networks(1, actor_sizes, settings.batch, self._rng)
        self.critics = Networks(2, critic_sizes, settings.batch, self._rng)
        self.targets = Networks(2, critic_sizes, settings.batch, self._rng)
        self.targets.parameters[:] = self.critics.parameters
        self.log_temperature = np.full(1, math.log(settings.temperature), np.float32)
        self._actor_adam = Adam(self.actor.parameters, settings.rate)
        self._critic_adam = Adam(self.critics.parameters, settings.rate)
        self._temperature_adam = Adam(self.log_temperature, settings.temperature_rate)

    def add(self, episode: Episode) -> None:
        self.ring.add(episode)

    def update(self, count: int) -> None:
        """`count` gradient updates, each on a fresh batch drawn uniformly."""
        for _ in range(count):
            batch = self.ring.sample(self.settings.batch, self._rng)
            self._update_critics(batch)
            if self.updates % self.settings.actor_period == 0:
                self._update_actor(batch.states)
            self.updates += 1

    def layers(self) -> list[Layer]:
        """The actor: hidden layers, then the heads of mean and log std. Views that follow it."""
        *hidden, (weight, bias) = [(weight[0].T, bias[0]) for weight, bias in self.actor.layers]
        return [*hidden, *zip(np.split(weight, 2), np.split(bias, 2), strict=True)]

    def _draw(self, states: Floats) -> "Draw":
        mean, log_std = np.split(self.actor.forward(states)[0], 2, axis=-1)
        return Draw(mean, log_std, self._rng.standard_normal(mean.shape, dtype=np.float32))

    def _update_critics(self, batch: Transitions) -> None:
        """Squared distance of each critic to reward + discounted soft value of what follows."""
        draw = self._draw(batch.next_states)
        values = self.targets.forward(np.hstack((batch.next_states, draw.actions)))[..., 0]
        soft_values = values.min(axis=0) - np.exp(self.log_temperature) * draw.log_probs()
        goals = batch.rewards + self.settings.discount * batch.goes_on * soft_values
        values = self.critics.forward(np.hstack((batch.states, batch.actions)))[..., 0]
        self.critics.backward((values - goals)[..., None] * (2 / len(goals)))
        self._critic_adam.step(self.critics.gradients)
        change = self.critics.parameters - self.targets.parameters
        change *= self.settings.target_rate
        self.targets.parameters += change

    def _update_actor(self, states: Floats) -> None:
        """Mean of temperature * log p(a | s) - min Q(s, a), over actions that follow the actor."""
        draw = self._draw(states)
        values = self.critics.forward(np.hstack((states, draw.actions)))  # [2, B, 1]
        lower = (values == values.min(axis=0)).astype(np.float32)
        slopes = self.critics.backward_inputs(lower)[..., self._sizes[0] :].sum(axis=0)
        gradients = draw.gradients(slopes, np.exp(self.log_temperature))
        gradients *= 1 / len(states)
        self.actor.backward(gradients[None])
        self._actor_adam.step(self.actor.gradients)
        # Target entropy: -A nats. Slope of log_temperature * (entropy - target).
        self._temperature_adam.step(self._sizes[1] - draw.log_probs().mean(keepdims=True))


class Ring:
    """The last `capacity` transitions, one row each, so that a batch is a single gather."""

    def __init__(self, state_size: int, action_size: int, capacity: int) -> None:
        ends = np.cumsum([0, state_size, action_size, 1, 1, state_size]).tolist()
        self._columns = [slice(*pair) for pair in itertools.pairwise(ends)]
        self._rows = np.empty((capacity, ends[-1]), np.float32)
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, len(self._rows))

    def add(self, episode: Episode) -> None:
        """Every transition of an episode. Only termination ends the future; the clock does not."""
        goes_on = np.ones(len(episode), np.float32)
        goes_on[-1] = not episode.terminated
        rows = np.column_stack(
            (episode.states[:-1], episode.actions, episode.rewards, goes_on, episode.states[1:])
        )
        slots = np.arange(self._added, self._added + len(rows)) % len(self._rows)
        self._rows[slots[-len(self._rows) :]] = rows[-len(self._rows) :]
        self._added += len(rows)

    def sample(self, batch: int, rng: np.random.Generator) -> Transitions:
        rows = self._rows.take(rng.integers(len(self), size=batch), axis=0)
        states, actions, rewards, goes_on, next_states = (rows[:, part] for part in self._columns)
        return Transitions(
            states=states,
            actions=actions,
            rewards=rewards[:, 0],
            goes_on=goes_on[:, 0],
            next_states=next_states,
        )


class Draw:
    """Actions [B, A], tanh of Gaussian draws u = mean + std * noise, and what follows from them."""

    def __init__(self, mean: Floats, log_std: Floats, noise: Floats) -> None:
        self._noise, self._log_std = noise, np.clip(log_std, *LOG_STD_RANGE)
        self._free = self._log_std == log_std  # the clip is flat outside its range
        self._offset = np.exp(self._log_std) * noise
        self._u = mean + self._offset
        self.actions: Floats = np.tanh(self._u)

    def log_probs(self) -> Floats:
        """log N(u) - sum log(1 - tanh(u)^2) [B]; the latter by |u|, so that nothing overflows."""
        size = np.abs(self._u)
        squash = 2 * (math.log(2) - size - np.log1p(np.exp(-2 * size)))
        gaussian = -0.5 * self._noise**2 - self._log_std - 0.5 * math.log(2 * math.pi)
        log_probs: Floats = (gaussian - squash).sum(axis=-1)
        return log_probs

    def gradients(self, slopes: Floats, temperature: Floats) -> Floats:
        """Of temperature * log p - Q by mean and log std [B, 2 A]; slopes are dQ / da [B, A].

        d log p / du = 2 a, da / du = 1 - a^2, du / d mean = 1, du / d log std = std * noise.
        """
        by_u = 2 * temperature * self.actions - slopes * (1 - self.actions**2)
        by_log_std = (by_u * self._offset - temperature) * self._free
        return np.hstack((by_u, by_log_std))


class Networks:
    """K ReLU networks of one shape, side by side: one batched product per layer."""

    def __init__(
        self, count: int, sizes: Sequence[int], batch: int, rng: np.random.Generator
    ) -> None:
        pairs = list(itertools.pairwise(sizes))
        bounds = [np.full(count * (i + 1) * o, 1 / math.sqrt(i), np.float32) for i, o in pairs]
        bound = np.concatenate(bounds)
        self.parameters: Floats = bound * (2 * rng.random(len(bound), dtype=np.float32) - 1)
        self.gradients = np.zeros_like(self.parameters)
        self.layers = list(_views(self.parameters, count, pairs))
        self._gradient_layers = list(_views(self.gradients, count, pairs))
        self._outputs = [np.empty((count, batch, size), np.float32) for size in sizes[1:]]
        self._slopes = [np.empty((count, batch, size), np.float32) for size in sizes[:-1]]
        self._inputs: list[Floats] = []  # of each layer, in the last forward pass

    def forward(self, x: Floats) -> Floats:
        """[B, in] -> [K, B, out]; the result is overwritten by the next call."""
        self._inputs = []
        for (weight, bias), output in zip(self.layers, self._outputs, strict=True):
            self._inputs.append(x)
            x = np.matmul(x, weight, out=output)
            x += bias[:, None]
            if output is not self._outputs[-1]:
                np.maximum(x, 0, out=x)
        return x

    def backward(self, slope: Floats) -> None:
        """Fill `gradients`, given d loss / d output [K, B, out] of the last forward pass."""
        for layer in reversed(range(len(self.layers))):
            weight_gradient, bias_gradient = self._gradient_layers[layer]
            np.matmul(self._inputs[layer].swapaxes(-1, -2), slope, out=weight_gradient)
            np.sum(slope, axis=1, out=bias_gradient)
            if layer:
                slope = self._through(layer, slope)

    def backward_inputs(self, slope: Floats) -> Floats:
        """d loss / d input [K, B, in], given d loss / d output; `gradients` stay as they are."""
        for layer in reversed(range(len(self.layers))):
            slope = self._through(layer, slope)
        return slope

    def _through(self, layer: int, slope: Floats) -> Floats:
        """The slope before a layer, from the slope after it."""
        weight, _ = self.layers[layer]
        slope = np.matmul(slope, weight.swapaxes(-1, -2), out=self._slopes[layer])
        if layer:  # its input is the ReLU of the layer before
            slope *= self._inputs[layer] > 0
        return slope


class Adam:
    """Kingma and Ba (2015) on one flat vector [P], in place."""

    def __init__(self, parameters: Floats, rate: float) -> None:
        self._parameters, self._rate, self._steps = parameters, rate, 0
        self._mean, self._square = np.zeros_like(parameters), np.zeros_like(parameters)
        self._scratch = np.empty_like(parameters)

    def step(self, gradients: Floats) -> None:
        self._steps += 1
        np.subtract(gradients, self._mean, out=self._scratch)
        self._scratch *= 1 - BETAS[0]
        self._mean += self._scratch
        np.square(gradients, out=self._scratch)
        self._scratch -= self._square
        self._scratch *= 1 - BETAS[1]
        self._square += self._scratch
        # Both moments start at 0; dividing by 1 - beta^steps corrects for it.
        unbias = math.sqrt(1 - BETAS[1] ** self._steps)
        np.sqrt(self._square, out=self._scratch)
        self._scratch += EPSILON * unbias
        np.divide(self._mean, self._scratch, out=self._scratch)
        self._scratch *= self._rate * unbias / (1 - BETAS[0] ** self._steps)
        self._parameters -= self._scratch


def _views(flat: Floats, count: int, pairs: Sequence[tuple[int, int]]) -> Iterator[Layer]:
    """weight [K, in, out] and bias [K, out] of each layer, cut from one vector [P]."""
    start = 0
    for inputs, outputs in pairs:
        middle = start + count * inputs * outputs
        end = middle + count * outputs
        yield (
            flat[start:middle].reshape(count, inputs, outputs),
            flat[middle:end].reshape(count, -1),
        )
        start = end
