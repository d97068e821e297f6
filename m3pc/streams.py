"""Random streams that are functions of numbers: nothing to save, nothing to restore."""

import numpy as np

# What a stream is for.
BATCH, MASKS, NOISE, CRITIC_BATCH, PLAN, BUFFER = range(6)


def counter_stream(seed: int, update: int, purpose: int = BATCH) -> np.random.Generator:
    """The stream of one update or step: Philox is a function of key and counter."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, purpose, update, 0]))
