"""The learners that share each batch: every one draws it whole and works on its own rows.

So a group computes what one learner would, up to rounding: sums go over the rows in another order.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, distributed

from m3pc.types import InputError


class PeersLostError(RuntimeError):
    """A learner of a group ended or did not answer in time: none of them can go on."""


class ProcessGroup:
    """A group of one. Nothing is divided, nothing is waited for."""

    rank, size = 0, 1

    def shard(self, rows: Tensor) -> Tensor:
        """This learner's part of a batch."""
        return rows

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean over all learners into the tensors of each."""

    def all_reduce(self, found: dict[str, float]) -> dict[str, float]:
        """Means over all learners."""
        return found

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        """Those of the first learner."""
        return list(numbers)

    def all_equal(self, number: int) -> bool:
        """Whether all learners have the same one. All hear the answer."""
        return True

    def barrier(self) -> None:
        """Wait until all learners are here."""
        self.all_equal(0)

    def per_rank_rng(self) -> AbstractContextManager[object]:
        """Inside, torch draws other numbers in each learner; after it, the same ones again."""
        return nullcontext()

    def leave(self) -> None:
        """The others hear of it when they next wait for this learner."""


class DistributedGroup(ProcessGroup):
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
        with self._hearing():
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

    def told(self, numbers: Sequence[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        with self._hearing():
            distributed.broadcast(values, src=0)
        return [int(value) for value in values]

    def same(self, number: int) -> bool:
        ends = torch.tensor([number, -number], dtype=torch.int64)
        with self._hearing():
            distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        return int(ends[0]) == -int(ends[1])

    @contextmanager
    def own_noise(self) -> Iterator[None]:
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(1 << 62, ())) + self.rank)
            yield

    def leave(self) -> None:
        distributed.destroy_process_group()

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeersLostError(
                f"learner {self.rank} of {self.size} lost the others: {error}; all of them start "
                "again from the newest checkpoint"
            ) from error
