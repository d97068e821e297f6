"""Straight lines through the states that are known: a first guess of the others, and slopes.

B rows, K states that are known, S state.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

CHANGE = 10.0  # a step changes a state by some tenths of what it varies: made as large as that


@lru_cache(maxsize=4096)  # random masks are many
def line_weights(known: tuple[int, ...], asked: tuple[int, ...]) -> Tensor:
    """How much each known step counts at each step asked for: [asked, known]. Read-only.

    Before the first known step and after the last the line is level; where no step is known, what
    is guessed is 0, the mean.
    """
    return torch.from_numpy(_weights(known, asked))


def _weights(known: Sequence[int], asked: Sequence[int]) -> np.ndarray:
    if not known:
        return np.zeros((len(asked), 0), np.float32)
    each = np.eye(len(known))
    columns = [np.interp(asked, known, one) for one in each]
    return np.stack(columns, axis=1).astype(np.float32)


def with_changes(states: Tensor, steps: Sequence[int]) -> Tensor:
    """[B, K, S] at rising steps -> [B, K, 2 S]: beside each, its slope since the one before."""
    apart = torch.as_tensor(np.diff(steps), dtype=states.dtype, device=states.device)
    slopes = states.diff(dim=1) / apart[:, None] * CHANGE
    return torch.cat([states, torch.nn.functional.pad(slopes, (0, 0, 1, 0))], dim=-1)
