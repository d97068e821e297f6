"""How sure a mean of paired differences is."""

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000  # of the bootstrap
SEED = 0


def interval(gains: NDArray[np.float64]) -> tuple[float, float]:
    """95 % of the mean of paired differences [runs, episodes], by a bootstrap that draws training
    seeds first and then episodes: both are samples."""
    rng = np.random.default_rng(SEED)
    runs, episodes = gains.shape
    run = rng.integers(runs, size=(DRAWS, runs, 1))
    episode = rng.integers(episodes, size=(DRAWS, runs, episodes))
    low, high = np.percentile(gains[run, episode].mean(axis=(1, 2)), [2.5, 97.5])
    return float(low), float(high)
