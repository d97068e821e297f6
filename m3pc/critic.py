"""What states and actions are worth: twin Q and V, small ReLU networks.

M networks side by side, B rows, S state, A action.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3pc.config import CriticConfig


class Stack(nn.Module):
    """M networks of the same shape, one batched product a layer for all of them."""

    def __init__(self, members: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = len(sizes) - 1
        for number, (inputs, outputs) in enumerate(pairwise(sizes)):
            for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
                bound = 1 / math.sqrt(inputs)
                start = torch.empty(members, *shape).uniform_(-bound, bound)
                self.register_parameter(f"{name}{number}", nn.Parameter(start))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] -> [M, B]."""
        for number in range(self.layers):
            weight, bias = getattr(self, f"weight{number}"), getattr(self, f"bias{number}")
            x = x.expand(len(weight), *x.shape[-2:])
            x = torch.baddbmm(bias[:, None], x, weight.mT)
            x = functional.relu(x) if number < self.layers - 1 else x
        return x[..., 0]


class Critic(nn.Module):
    """Q1, Q2 and V of raw states, which it scales by the mean and spread of its data."""

    state_mean: Tensor  # [S]
    state_std: Tensor  # [S]

    def __init__(self, config: CriticConfig, state_size: int, action_size: int) -> None:
        super().__init__()
        hidden = [config.width] * config.layers
        self.q = Stack(2, [state_size + action_size, *hidden, 1])
        self.v = Stack(1, [state_size, *hidden, 1])
        self.register_buffer("state_mean", torch.zeros(state_size))
        self.register_buffer("state_std", torch.ones(state_size))

    def scaled(self, states: Tensor) -> Tensor:
        return (states - self.state_mean) / self.state_std

    def twins(self, states: Tensor, actions: Tensor) -> Tensor:
        """Q1 and Q2 of raw states [B, S] and actions [B, A]: [2, B]."""
        found: Tensor = self.q(torch.cat([self.scaled(states), actions], dim=-1))
        return found

    def quality(self, states: Tensor, actions: Tensor) -> Tensor:
        """The lower of the two: [B]."""
        return self.twins(states, actions).amin(dim=0)

    def value(self, states: Tensor) -> Tensor:
        """V of raw states [B, S]: [B]."""
        found: Tensor = self.v(self.scaled(states))[0]
        return found
