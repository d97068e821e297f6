"""Learners that share each batch: all draw the same batch, and each works on its own rows.

A group computes the same as one learner, up to rounding: sums have another order.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, distributed

from m3pc.types import InputError


class PeersLostError(RuntimeError):
    """A learner of the group ended or did not answer in time: none of them can go on."""


class ProcessGroup:
    """A group of one: no batch is divided and no call waits."""

    rank, size = 0, 1

    def shard(self, rows: Tensor) -> Tensor:
        """This learner's part of a batch."""
        return rows

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors, in place, by their means over all learners."""

    def all_reduce(self, numbers: dict[str, float]) -> dict[str, float]:
        """Means over all learners."""
        return numbers

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of rank 0; all learners must pass equally many."""
        return list(numbers)

    def all_equal(self, number: int) -> bool:
        """Whether all learners pass the same number; all get the same answer."""
        return True

    def barrier(self) -> None:
        """Wait until all learners have come this far."""
        self.all_equal(0)

    def per_rank_rng(self) -> AbstractContextManager[object]:
        """Inside, torch draws different numbers in each learner; afterwards, equal ones again."""
        return nullcontext()

    def leave(self) -> None:
        """Give up the connection; the others fail when they next wait for this learner."""


class DistributedGroup(ProcessGroup):
    """The processes of torch.distributed's default group, which must exist."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def shard(self, rows: Tensor) -> Tensor:
        if len(rows) % self.size:
            raise InputError(
                f"{len(rows)} rows cannot be shared by {self.size} learners alike; give batches "
                "whose mask groups have a multiple of fleet.learners rows"
            )
        return rows[self.rank :: self.size]

    def average(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._peers_required():
            distributed.all_reduce(flat)
        flat /= self.size
        means = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    def all_reduce(self, numbers: dict[str, float]) -> dict[str, float]:
        values = torch.tensor(list(numbers.values()), dtype=torch.float64)
        self.average([values])
        return dict(zip(numbers, values.tolist(), strict=True))

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        with self._peers_required():
            distributed.broadcast(values, src=0)
        return [int(value) for value in values]

    def all_equal(self, number: int) -> bool:
        extremes = torch.tensor([number, -number], dtype=torch.int64)
        with self._peers_required():
            distributed.all_reduce(extremes, distributed.ReduceOp.MAX)
        return int(extremes[0]) == -int(extremes[1])

    @contextmanager
    def per_rank_rng(self) -> Iterator[None]:
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(1 << 62, ())) + self.rank)
            yield

    def leave(self) -> None:
        distributed.destroy_process_group()

    @contextmanager
    def _peers_required(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeersLostError(
                f"learner {self.rank} of {self.size} lost the others: {error}; all of them start "
                "again from the newest checkpoint"
            ) from error
