"""Draws batches from several sources, each with a share. B batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from m3pc.core.rng import BATCH, counter_stream
from m3pc.types import InputError, Integers
from replay.sampling.sampler import BatchBuilder, SampledRows, WindowIndex
from replay.sampling.selectors import episode_weights
from replay.store.view import StoreView, drawable

B = TypeVar("B")
V = TypeVar("V", bound=StoreView)

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples fill [0, 2^64) evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSource(Generic[V]):
    name: str
    view: V
    selector: Callable[[V], Integers]  # weights of the view's episodes: see selectors.py
    share: float  # fraction of the batch, from 0 to 1
    min_steps: int = 0  # with fewer steps the source is not drawn from


class Mixture(Generic[B]):
    """Mixes windows of several sources in one batch, at random positions.

    A batch is a function of the views, the seed and the update. A source without a window, or with
    fewer than `min_steps` steps, leaves its share of the batch to the others.
    """

    def __init__(
        self,
        sources: Sequence[MixtureSource[Any]],
        builder: BatchBuilder[B],
        *,
        batch: int,
        seed: int,
        purpose: int = BATCH,
    ) -> None:
        self.sources, self._builder = sources, builder
        self._batch, self._seed, self._purpose = batch, seed, purpose
        length = builder.length
        self._windows = [
            WindowIndex(s.view, length, episode_weights(s.view, s.selector, length=length))
            for s in sources
        ]
        self._ready = [
            windows.weight > 0 and _steps(source.view) >= source.min_steps
            for source, windows in zip(sources, self._windows, strict=True)
        ]

    def source(self, name: str) -> MixtureSource[Any]:
        return next(source for source in self.sources if source.name == name)

    def latest(self) -> "Mixture[B]":
        """Return the same mixture of the stores' current views; only new segments are read."""
        sources = [replace(source, view=source.view.latest()) for source in self.sources]
        return Mixture(
            sources, self._builder, batch=self._batch, seed=self._seed, purpose=self._purpose
        )

    def batch(self, update: int) -> B:
        rng = counter_stream(self._seed, update, self._purpose)
        counts = self.counts(update)
        used = [(windows, n) for windows, n in zip(self._windows, counts, strict=True) if n]
        if len(used) == 1:
            return self._builder.gather(used[0][0].draw(rng, self._batch))
        order = rng.permutation(self._batch)  # parts of a batch differ in their masks: mix each
        draws = [windows.draw(rng, n) for windows, n in used]
        return self._builder.gather(_placed(draws, order))

    def counts(self, update: int) -> list[int]:
        """How many windows of this batch come from each source."""
        if not any(self._ready):
            steps = ", ".join(f"{s.name} in {s.view.path}: {_steps(s.view)}" for s in self.sources)
            raise InputError(
                f"no source can be drawn from (steps of {steps}); expected an episode of "
                f"{self._builder.length} steps in one of them; collect some or give logged data"
            )
        shares = [s.share * ready for s, ready in zip(self.sources, self._ready, strict=True)]
        # If no ready source has a share, all ready sources get the same share.
        return split_batch(self._batch, shares if any(shares) else self._ready, update)


def split_batch(batch: int, shares: Sequence[float], update: int) -> list[int]:
    """Split the batch by shares into integers, each rounded down or up.

    The shares lie end to end on a line. Their ends, plus an offset in [0, 1), are rounded down. The
    offsets of successive updates fill [0, 1) evenly, so each source gets its share on average. A
    share that is an integer number of windows is never rounded.
    """
    offset = (update * GOLDEN % 2**64 >> 32) / 2**32  # 32 bits: `ends + offset` is not rounded up
    ends = np.round(batch * np.cumsum(shares) / sum(shares), 9)  # 0.1 + 0.2 is meant to be 0.3
    cuts = np.floor(ends + offset).astype(np.int64)
    return [int(count) for count in np.diff(cuts, prepend=0)]


def _placed(draws: Sequence[SampledRows], order: Integers) -> SampledRows:
    """Join draws into one batch: their windows, one after another, get the positions `order`."""
    parts, steps, low = [], np.empty_like(order), 0
    for draw in draws:
        positions = order[low : low + len(draw.steps)]
        steps[positions] = draw.steps
        parts += [part._replace(positions=positions[part.positions]) for part in draw.parts]
        low += len(draw.steps)
    return SampledRows(parts, steps)


def _steps(view: StoreView) -> int:
    return int(view.lengths[drawable(view)].sum())
