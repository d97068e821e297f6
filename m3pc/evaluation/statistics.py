"""Confidence intervals of means and rates."""

import math

import numpy as np

from m3pc.types import Doubles

RESAMPLES = 10_000  # bootstrap samples
SEED = 0
NORMAL_QUANTILE = 1.959964  # 97.5 % of the standard normal distribution
# 97.5 % quantile of Student's t for 2, 3, ... values; for more the last one, which is wider.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def bootstrap_interval(gains: Doubles) -> tuple[float, float]:
    """95 % interval of the mean of paired differences [runs, episodes]. The bootstrap draws
    training seeds first and then episodes, because both are samples."""
    rng = np.random.default_rng(SEED)
    runs, episodes = gains.shape
    run = rng.integers(runs, size=(RESAMPLES, runs, 1))
    episode = rng.integers(episodes, size=(RESAMPLES, runs, episodes))
    low, high = np.percentile(gains[run, episode].mean(axis=(1, 2)), [2.5, 97.5])
    return float(low), float(high)


def t_interval(values: Doubles) -> tuple[float, float]:
    """95 % interval of the mean of few values [N], such as training seeds; NaN for one value."""
    if len(values) < 2:
        return math.nan, math.nan
    quantile = T_QUANTILES[min(len(values) - 2, len(T_QUANTILES) - 1)]
    half = quantile * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate: within [0, 1], and valid for few trials."""
    z2 = NORMAL_QUANTILE**2
    centre = (successes + z2 / 2) / (trials + z2)
    rate = successes / trials
    half = NORMAL_QUANTILE * math.sqrt(rate * (1 - rate) * trials + z2 / 4) / (trials + z2)
    return max(centre - half, 0.0), min(centre + half, 1.0)
