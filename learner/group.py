"""The learners that share each batch: every one draws it whole and works on its own rows.

So a group computes what one learner would, up to rounding: sums go over the rows in another order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from m3pc.types import InputError


class Group:
    """A group of one. Nothing is divided, nothing is waited for."""

    rank, size = 0, 1

    def share(self, rows: Tensor) -> Tensor:
        """This learner's part of a batch."""
        return rows

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean over all learners into the tensors of each."""

    def numbers(self, found: dict[str, float]) -> dict[str, float]:
        """Means over all learners."""
        return found


class Distributed(Group):
    """The processes of torch.distributed's default group, which must exist."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def share(self, rows: Tensor) -> Tensor:
        if len(rows) % self.size:
            raise InputError(
                f"{len(rows)} rows cannot be shared by {self.size} learners alike; give batches "
                "whose mask groups have a multiple of fleet.learners rows"
            )
        return rows[self.rank :: self.size]

    def average(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        distributed.all_reduce(flat)
        flat /= self.size
        place = 0
        for tensor in tensors:
            tensor.copy_(flat[place : place + tensor.numel()].view_as(tensor))
            place += tensor.numel()

    def numbers(self, found: dict[str, float]) -> dict[str, float]:
        values = torch.tensor(list(found.values()), dtype=torch.float64)
        self.average([values])
        return dict(zip(found, values.tolist(), strict=True))
