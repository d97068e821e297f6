"""Seeds of episodes: which number goes into which SeedSequence, so that no two uses coincide.

The layouts are fixed: a data set, an evaluation or a run that is made again from its seed must get
the same episodes.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

EpisodeStart = tuple[int, int]  # (reset seed, planning seed)

COLLECT, EVALUATE = 1, 2  # spawn keys of a run's seed


def data_episode(seed: int, *numbers: int) -> tuple[int, np.random.Generator]:
    """The reset seed and the policy's random stream for one episode of a data set."""
    reset_seed, noise_seed = np.random.SeedSequence([seed, *numbers]).spawn(2)
    # Gymnasium takes a non-negative Python integer; 31 bits are safe for every environment.
    return int(reset_seed.generate_state(1)[0] >> 1), np.random.default_rng(noise_seed)


def evaluation_episode(seed: int, *numbers: int) -> EpisodeStart:
    """The same reset as `data_episode`, and a planning seed of its own."""
    reset_seed, _ = data_episode(seed, *numbers)
    # `data_episode` spawns the children 0 and 1 of this sequence.
    child = np.random.SeedSequence([seed, *numbers], spawn_key=(2,))
    return reset_seed, int(child.generate_state(1, np.uint64)[0] >> 1)  # fits an int64


def rollout_episodes(seed: int, slot: int, incarnation: int) -> Iterator[EpisodeStart]:
    """Starts for one incarnation of a rollout actor; no other, and no evaluation, has them."""
    # An evaluation's (seed, number) equals (seed, number, 0, 0): incarnation + 1 is never 0.
    return (evaluation_episode(seed, slot, incarnation + 1, number) for number in count())


def lock_step_episode(seed: int, number: int) -> EpisodeStart:
    """The start of one episode of a run in a single process (`--local`)."""
    child = np.random.SeedSequence([seed, number], spawn_key=(COLLECT,))
    reset_seed, planning_seed = child.generate_state(2, np.uint64)
    return int(reset_seed >> 33), int(planning_seed >> 1)


def run_evaluation(seed: int) -> int:
    """The seed of every evaluation of a run: all of them play the same episodes."""
    child = np.random.SeedSequence(seed, spawn_key=(EVALUATE,))
    return int(child.generate_state(1)[0])
