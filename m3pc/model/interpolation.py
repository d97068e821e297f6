"""Linear interpolation between known states: a first estimate of the others, and slopes.

B rows, K known states, S state.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

CHANGE_SCALE = 10.0  # one step changes a normalised state by some tenths; scaled to about 1


@lru_cache(maxsize=4096)  # training draws many different masks
def line_weights(known: tuple[int, ...], queried: tuple[int, ...]) -> Tensor:
    """Interpolation weight of each known step at each queried one: [queried, known]. Read-only.

    Before the first known step and after the last the line is constant. If no step is known, the
    estimate is 0, the mean.
    """
    if not known:
        return torch.zeros(len(queried), 0)
    columns = [np.interp(queried, known, basis) for basis in np.eye(len(known))]
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))


def with_changes(states: Tensor, steps: Sequence[int]) -> Tensor:
    """[B, K, S] at increasing steps -> [B, K, 2 S]: each state and its slope since the previous."""
    gaps = torch.as_tensor(np.diff(steps), dtype=states.dtype, device=states.device)
    slopes = states.diff(dim=1) / gaps[:, None] * CHANGE_SCALE
    return torch.cat([states, torch.nn.functional.pad(slopes, (0, 0, 1, 0))], dim=-1)
