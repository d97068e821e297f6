"""How fast windows of 8 steps come out of a store, compared with a Python loop and with memcpy.

    python -m benchmarks.sampling [--rows 10000 100000 1000000 10000000]

One run, one thread, batch 2048, hopper's sizes (11 state and 3 action dimensions), named columns.
Everything is measured in turns, so that a noisy machine disturbs all of it alike; the median of
the turns counts. `memcpy` copies as many bytes as a batch has from one place to another;
`scattered` copies them from as many random places as a batch has windows, which no sampler can beat
by much once the data are larger than the caches.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from m3pc.core.returns import ReturnRule, returns_to_go
from m3pc.core.rng import counter_stream
from m3pc.types import Episode
from replay.format.manifest import Header
from replay.sampling.sampler import Sampler
from replay.store.store import Store, write_store

STATES, ACTIONS, LENGTH, BATCH, EPISODE = 11, 3, 8, 2048, 1000
TURNS, SECONDS = 7, 0.3  # how often, and how long each candidate runs in a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    rows = parser.parse_args().rows
    print(f"batch {BATCH}, windows of {LENGTH} steps; millions of windows a second, one thread")
    print(
        f"{'rows':>10} {'files':>5} {'store':>8} {'loop':>8} {'scattered':>9} {'memcpy':>8}"
        f" {'store/loop':>10} {'store/scattered':>15} {'store/memcpy':>12}"
    )
    for count in rows:
        with tempfile.TemporaryDirectory() as folder:
            report(make(Path(folder) / "store", count))


def make(path: Path, rows: int) -> Store:
    rng = np.random.default_rng(0)
    header = Header(
        states=STATES,
        actions=ACTIONS,
        max_episode_steps=EPISODE,
        env=None,
        source={"kind": "benchmark"},
    )
    with write_store(path, header) as writer:
        for _ in range(rows // EPISODE):
            writer.append(
                Episode(
                    states=rng.standard_normal((EPISODE + 1, STATES), np.float32),
                    actions=rng.random((EPISODE, ACTIONS), np.float32),
                    rewards=rng.random(EPISODE, np.float32),
                    terminated=False,
                    truncated=True,
                )
            )
    return Store(path)


def report(store: Store) -> None:
    rule = ReturnRule(max_episode_steps=EPISODE)
    sampler = Sampler(store, length=LENGTH, batch=BATCH, seed=0, returns=rule)
    candidates: dict[str, Callable[[int], object]] = {
        "store": sampler.batch,
        "loop": Loop(store).batch,
        "scattered": Scattered(store.totals.steps).batch,
        "memcpy": Memcpy().batch,
    }
    speed = measure(candidates)
    store_speed = speed["store"]
    print(
        f"{store.totals.steps:>10} {len(store.segments):>5} "
        f"{store_speed:>8.2f} {speed['loop']:>8.3f} {speed['scattered']:>9.2f} "
        f"{speed['memcpy']:>8.2f} {store_speed / speed['loop']:>9.1f}x "
        f"{store_speed / speed['scattered']:>14.2f}x {store_speed / speed['memcpy']:>11.2f}x"
    )


class Loop:
    """The obvious way: draw an episode and a start, slice, collect, stack."""

    def __init__(self, store: Store) -> None:
        rule = ReturnRule(max_episode_steps=EPISODE)
        self._episodes = [
            (e.states, e.actions, e.rewards, returns_to_go(e.rewards, np.array([len(e)]), rule))
            for e in store.episodes()
        ]

    def batch(self, update: int) -> object:
        rng = counter_stream(0, update)
        windows = []
        for _ in range(BATCH):
            episode = self._episodes[rng.integers(len(self._episodes))]
            first = rng.integers(EPISODE - LENGTH + 1)
            windows.append([column[first : first + LENGTH] for column in episode])
        return [np.stack(column) for column in zip(*windows, strict=True)]


class Scattered:
    """As many bytes from as many random places, from one packed matrix."""

    def __init__(self, rows: int) -> None:
        self._count = rows - LENGTH
        row = 4 * (STATES + ACTIONS + 2)
        packed = np.random.default_rng(0).random((rows, row // 4), np.float32)
        self._view = np.ndarray((self._count,), f"V{LENGTH * row}", packed, strides=(row,))

    def batch(self, update: int) -> object:
        return self._view[counter_stream(1, update).integers(self._count, size=BATCH)]


class Memcpy:
    def __init__(self) -> None:
        self._source = np.ones(BATCH * LENGTH * (STATES + ACTIONS + 2), np.float32)
        self._target = np.empty_like(self._source)

    def batch(self, update: int) -> object:
        self._target[:] = self._source
        return self._target


def measure(candidates: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """Median over turns of each candidate's millions of windows a second."""
    turns: dict[str, list[float]] = {name: [] for name in candidates}
    update = 0
    for _ in range(TURNS):
        for name, batch in candidates.items():
            done, start = 0, time.perf_counter()
            while time.perf_counter() - start < SECONDS:
                batch(update)
                update, done = update + 1, done + BATCH
            turns[name].append(done / (time.perf_counter() - start) / 1e6)
    return {name: float(np.median(speeds)) for name, speeds in turns.items()}


if __name__ == "__main__":
    main()
