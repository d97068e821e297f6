"""A behaviour policy in plain numpy: a small ReLU network with a tanh-squashed Gaussian on top."""

from dataclasses import dataclass

import numpy as np

from m3pc.types import LOG_STD_RANGE, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    weight: Floats  # [out, in]
    bias: Floats  # [out]

    def __call__(self, x: Floats) -> Floats:
        return self.weight @ x + self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class TanhGaussian:
    """One state in, one action out: results never depend on what else is being rolled out."""

    hidden: tuple[Linear, ...]
    mean: Linear
    log_std: Linear

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        """tanh of a Gaussian draw [A]; with no `rng`, of the Gaussian's mean."""
        x: Floats = state
        for layer in self.hidden:
            x = np.maximum(layer(x), np.float32(0))
        u = self.mean(x)
        if rng is not None:
            std: Floats = np.exp(self.log_std(x).clip(*LOG_STD_RANGE))
            u = u + std * rng.standard_normal(len(u), dtype=np.float32)
        return np.tanh(u)
