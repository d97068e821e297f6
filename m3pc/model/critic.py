"""The critic: twin Q and V, small ReLU networks.

M networks in parallel, B rows, S state, A action.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from m3pc.config.schema import CriticConfig


class EnsembleMLP(nn.Module):
    """M networks of the same shape, computed together: one batched product per layer."""

    def __init__(self, members: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self._names = []  # weight0, bias0, weight1, ...
        for number, initial in enumerate(stacked_parameters(sizes, (members,))):
            self._names.append(f"{('weight', 'bias')[number % 2]}{number // 2}")
            self.register_parameter(self._names[-1], nn.Parameter(initial))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] -> [M, B]."""
        return stacked_forward([getattr(self, name) for name in self._names], x)


def stacked_parameters(
    sizes: Sequence[int], stack: tuple[int, ...], generator: torch.Generator | None = None
) -> list[Tensor]:
    """weight [*stack, out, in], bias [*stack, out] per layer, uniform within 1 / sqrt(in)."""
    return [
        torch.empty(shape).uniform_(-bound, bound, generator=generator)
        for inputs, outputs in pairwise(sizes)
        for bound in [1 / math.sqrt(inputs)]
        for shape in ((*stack, outputs, inputs), (*stack, outputs))
    ]


def stacked_forward(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """One output of each network: [B, inputs] -> [M, B]."""
    *hidden, weight, bias = parameters
    x = x.expand(len(weight), -1, -1)
    for hidden_weight, hidden_bias in zip(hidden[::2], hidden[1::2], strict=True):
        x = torch.baddbmm(hidden_bias[:, None], x, hidden_weight.mT).relu()
    return torch.baddbmm(bias[:, None], x, weight.mT)[..., 0]


class Critic(nn.Module):
    """Q1, Q2 and V of raw states, which are normalised inside by the data's mean and std."""

    state_mean: Tensor  # [S]
    state_std: Tensor  # [S]

    def __init__(self, config: CriticConfig, state_size: int, action_size: int) -> None:
        super().__init__()
        hidden = [config.width] * config.layers
        self.q = EnsembleMLP(2, [state_size + action_size, *hidden, 1])
        self.v = EnsembleMLP(1, [state_size, *hidden, 1])
        self.register_buffer("state_mean", torch.zeros(state_size))
        self.register_buffer("state_std", torch.ones(state_size))

    def normalise(self, states: Tensor) -> Tensor:
        return (states - self.state_mean) / self.state_std

    def q_values(self, states: Tensor, actions: Tensor) -> Tensor:
        """Q1 and Q2 of raw states [B, S] and actions [B, A]: [2, B]."""
        q_values: Tensor = self.q(torch.cat([self.normalise(states), actions], dim=-1))
        return q_values

    def min_q(self, states: Tensor, actions: Tensor) -> Tensor:
        """The lower of Q1 and Q2, against overestimation: [B]."""
        return self.q_values(states, actions).amin(dim=0)

    def value(self, states: Tensor) -> Tensor:
        """V of raw states [B, S]: [B]."""
        value: Tensor = self.v(self.normalise(states))[0]
        return value
