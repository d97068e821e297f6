"""How sure a mean is."""

import math

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000  # of the bootstrap
SEED = 0
# 97.5 % quantile of Student's t for 2, 3, ... values; for more the last one, which is wider.
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def interval(gains: NDArray[np.float64]) -> tuple[float, float]:
    """95 % of the mean of paired differences [runs, episodes], by a bootstrap that draws training
    seeds first and then episodes: both are samples."""
    rng = np.random.default_rng(SEED)
    runs, episodes = gains.shape
    run = rng.integers(runs, size=(DRAWS, runs, 1))
    episode = rng.integers(episodes, size=(DRAWS, runs, episodes))
    low, high = np.percentile(gains[run, episode].mean(axis=(1, 2)), [2.5, 97.5])
    return float(low), float(high)


def t_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """95 % of the mean of few values [N], such as one a training seed; NaN for a single one."""
    if len(values) < 2:
        return math.nan, math.nan
    quantile = QUANTILES[min(len(values) - 2, len(QUANTILES) - 1)]
    half = quantile * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half
