"""Batches from several sources, each at its share. B batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from m3pc.core.rng import BATCH, counter_stream
from m3pc.types import InputError
from replay.sampling.sampler import BatchBuilder, WindowIndex, combined
from replay.sampling.selectors import Selection, weights
from replay.store.view import StoreView, drawable

B = TypeVar("B")

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples fill [0, 2^64) evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of the batch: from `first` at update 0 along a line to `last` after `updates`."""

    first: float
    last: float
    updates: int

    def __post_init__(self) -> None:
        if not (0 <= self.first <= 1 and 0 <= self.last <= 1 and self.updates >= 1):
            raise InputError(
                f"a share goes from {self.first} to {self.last} in {self.updates} updates; "
                "give numbers from 0 to 1 and an update at least"
            )

    def at(self, update: int) -> float:
        done = min(update / self.updates, 1.0)
        return (1 - done) * self.first + done * self.last


def fixed(share: float) -> Share:
    return Share(first=share, last=share, updates=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSource:
    name: str
    view: StoreView
    selection: Selection
    share: Share
    after: int = 0  # steps that must be there before any is drawn


class Mixture(Generic[B]):
    """Pieces of several sources at one moment of each, in one batch and at random positions.

    A batch is a function of the views, the seed and the update. Each source gets its share of the
    batch; one that has nothing to draw, or less than it needs, leaves its share to the others.
    """

    def __init__(
        self,
        sources: Sequence[MixtureSource],
        columns: BatchBuilder[B],
        *,
        batch: int,
        seed: int,
        purpose: int = BATCH,
    ) -> None:
        self.sources, self._batch, self._seed, self._purpose = sources, batch, seed, purpose
        parts = [source.view.segments for source in sources]
        self._columns = columns.at([segment for part in parts for segment in part])
        before = accumulate(map(len, parts), initial=0)
        self._pieces = [
            _pieces(source, columns.length, n) for source, n in zip(sources, before, strict=False)
        ]
        self._ready = [
            pieces.weight > 0 and _steps(source.view) >= source.after
            for source, pieces in zip(sources, self._pieces, strict=True)
        ]

    def later(self) -> "Mixture[B]":
        """The same from the stores as they are now; only new segments cost anything."""
        sources = [replace(source, view=source.view.later()) for source in self.sources]
        return Mixture(
            sources, self._columns, batch=self._batch, seed=self._seed, purpose=self._purpose
        )

    def batch(self, update: int, out: B | None = None) -> B:
        """Into the arrays of `out`, or into new ones."""
        rng = counter_stream(self._seed, update, self._purpose)
        counts = self.counts(update)
        used = [(pieces, n) for pieces, n in zip(self._pieces, counts, strict=True) if n]
        if len(used) == 1:
            return self._columns.gather(used[0][0].draw(rng, self._batch), out)
        order = rng.permutation(self._batch)  # masks are laid on parts of a batch: each is a mix
        drawn = combined([pieces.draw(rng, n) for pieces, n in used], order)
        return self._columns.gather(drawn, out)

    def counts(self, update: int) -> list[int]:
        """How many pieces of this batch come from each source."""
        if not any(self._ready):
            found = ", ".join(f"{s.name} in {s.view.path}: {_steps(s.view)}" for s in self.sources)
            raise InputError(
                f"no source can be drawn from (steps of {found}); expected an episode of "
                f"{self._columns.length} steps in one of them; collect some or give logged data"
            )
        wanted = [source.share.at(update) for source in self.sources]
        shares = [x * ready for x, ready in zip(wanted, self._ready, strict=True)]
        # Where none of those that are ready has a share, all of them have the same.
        return divided(self._batch, shares if any(shares) else self._ready, update)


def divided(batch: int, shares: Sequence[float], update: int) -> list[int]:
    """Whole numbers that sum to the batch: each share of it, rounded down or up.

    The shares lie end to end on a line; an offset in [0, 1) that goes evenly through all updates
    says where it is cut to whole numbers. So over many updates each gets its share on average, and
    a share that is a whole number of pieces is never rounded.
    """
    offset = (update * GOLDEN % 2**64 >> 32) / 2**32  # so coarse that no sum below is rounded up
    ends = np.round(batch * np.cumsum(shares) / sum(shares), 9)  # 0.1 + 0.2 is meant to be 0.3
    cuts = np.floor(ends + offset).astype(np.int64)
    return [int(count) for count in np.diff(cuts, prepend=0)]


def _pieces(source: MixtureSource, length: int, before: int) -> WindowIndex:
    weight = weights(source.view, source.selection, length=length)
    return WindowIndex(source.view, length, weight, before=before)


def _steps(view: StoreView) -> int:
    return int(view.lengths[drawable(view)].sum())
