"""Episodes as actors would send them, and whether a store has each of them once. Hopper's sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from m3pc.types import AppendKey, Episode
from replay.format.manifest import Header
from replay.format.payload import encode
from replay.store.store import Store

STATES, ACTIONS, HORIZON = 11, 3, 1000
HEADER = Header(
    states=STATES,
    actions=ACTIONS,
    max_episode_steps=HORIZON,
    env=None,
    source={"kind": "benchmark"},
)
KINDS = 32  # different episodes, sent over and over under new keys


class Parcel(NamedTuple):
    steps: int
    payload: bytes


def parcels() -> list[Parcel]:
    """Episodes of 100 to 1000 steps, 550 on average, in no order."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.linspace(100, HORIZON, KINDS).astype(np.int64)).tolist()
    return [Parcel(length, encode(_episode(rng, length))) for length in lengths]


def _episode(rng: np.random.Generator, length: int) -> Episode:
    return Episode(
        states=rng.standard_normal((length + 1, STATES), np.float32),
        actions=rng.random((length, ACTIONS), np.float32),
        rewards=rng.random(length, np.float32),
        terminated=False,
        truncated=True,
    )


class Sent(NamedTuple):
    """What one producer sent and saw acknowledged."""

    episodes: int
    steps: int


class Audit(NamedTuple):
    episodes: int  # that were acknowledged
    steps: int
    missing: int  # of these episodes
    twice: int
    strange: int  # episodes in the store that no producer sent


def audit(path: Path, sent: Sequence[Sent]) -> Audit:
    """Compare a store with what its producers, in the order of their slots, sent to it."""
    store = Store(path)
    rows = [row for s in store.segments if s.keys is not None for row in s.keys.tolist()]
    stored = [AppendKey(*row) for row in rows]
    expected = {
        AppendKey(slot, 0, sequence)
        for slot, (episodes, _) in enumerate(sent)
        for sequence in range(episodes)
    }
    steps = sum(producer.steps for producer in sent)
    assert store.totals.steps == steps, f"{store.totals.steps} steps stored, {steps} sent"
    return Audit(
        episodes=len(expected),
        steps=steps,
        missing=len(expected - set(stored)),
        twice=len(stored) - len(set(stored)),
        strange=len(set(stored) - expected),
    )
