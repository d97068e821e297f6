"""Behaviour policies in plain numpy: small ReLU networks. S state, A action."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from m3pc.types import LOG_STD_RANGE, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    weight: Floats  # [out, in]
    bias: Floats  # [out]

    def __call__(self, x: Floats) -> Floats:
        return self.weight @ x + self.bias


class Network(Protocol):
    """One state in, one action out: results never depend on what else is being rolled out."""

    @property
    def hidden(self) -> tuple[Linear, ...]: ...

    @property
    def mean(self) -> Linear: ...

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TanhGaussian:
    """A tanh-squashed Gaussian on top, as SAC has it."""

    hidden: tuple[Linear, ...]
    mean: Linear
    log_std: Linear

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        """tanh of a Gaussian draw [A]; with no `rng`, of the Gaussian's mean."""
        x = _through(self.hidden, state)
        u = self.mean(x)
        if rng is not None:
            std: Floats = np.exp(self.log_std(x).clip(*LOG_STD_RANGE))
            u = u + std * rng.standard_normal(len(u), dtype=np.float32)
        return np.tanh(u)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionPolicy:
    """The last layer gives the action itself, as cloning by least squares has it."""

    hidden: tuple[Linear, ...]
    mean: Linear

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        return self.mean(_through(self.hidden, state)).clip(-1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPolicy:
    """A policy that is shown other states than those it knows, or disturbed."""

    policy: Network
    columns: tuple[int, ...] | None = None  # of a state [S], in the order that it knows
    noise: float = 0.0  # standard deviation of what is added to each number of its actions

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        seen = state if self.columns is None else state[list(self.columns)]
        action = self.policy.act(seen, rng)
        if rng is None or not self.noise:
            return action
        disturbance = rng.standard_normal(len(action), dtype=np.float32)
        return (action + np.float32(self.noise) * disturbance).clip(-1, 1)


def _through(layers: tuple[Linear, ...], state: Floats) -> Floats:
    x: Floats = state
    for layer in layers:
        x = np.maximum(layer(x), np.float32(0))
    return x
