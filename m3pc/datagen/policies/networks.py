"""Behaviour policies as small ReLU networks in numpy. S numbers in a state, A in an action."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from m3pc.types import LOG_STD_RANGE, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A dense layer."""

    weight: Floats  # [out, in]
    bias: Floats  # [out]

    def __call__(self, x: Floats) -> Floats:
        return self.weight @ x + self.bias


class Network(Protocol):
    """A policy network. It takes one state at a time, so results do not depend on batching."""

    @property
    def hidden(self) -> tuple[Linear, ...]: ...

    @property
    def mean(self) -> Linear: ...

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TanhGaussian:
    """A network whose output is a tanh-squashed Gaussian, as in SAC."""

    hidden: tuple[Linear, ...]
    mean: Linear
    log_std: Linear

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        """The tanh of a Gaussian sample [A]; without `rng`, of the Gaussian's mean."""
        x = _through(self.hidden, state)
        u = self.mean(x)
        if rng is not None:
            std: Floats = np.exp(self.log_std(x).clip(*LOG_STD_RANGE))
            u = u + std * rng.standard_normal(len(u), dtype=np.float32)
        return np.tanh(u)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionPolicy:
    """A network whose last layer is the action, as behaviour cloning by least squares trains it."""

    hidden: tuple[Linear, ...]
    mean: Linear

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        return self.mean(_through(self.hidden, state)).clip(-1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPolicy:
    """A policy with reordered states or noisy actions."""

    policy: Network
    columns: tuple[int, ...] | None = None  # a state's columns in the policy's order; None: all
    noise: float = 0.0  # standard deviation of the noise on each number of an action

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        observation = state if self.columns is None else state[list(self.columns)]
        action = self.policy.act(observation, rng)
        if rng is None or not self.noise:
            return action
        noise = rng.standard_normal(len(action), dtype=np.float32)
        return (action + np.float32(self.noise) * noise).clip(-1, 1)


def _through(layers: tuple[Linear, ...], state: Floats) -> Floats:
    x: Floats = state
    for layer in layers:
        x = np.maximum(layer(x), np.float32(0))
    return x
