"""Regenerated data compared with the recorded episodes: returns, and every state dimension.

    python -m benchmarks.data_fidelity FILE.hdf5 STORE [FILE.hdf5 STORE ...]

FILE is a D4RL file with its behaviour policy, STORE the output of `m3pc data regenerate` for it.
Prints the tables of docs/results/data.md.
"""

import sys
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from m3pc.envs import normalised_score
from replay.store.statistics import statistics
from replay.store.store import Store

# Mean return of 300 rollouts of the same policies, computed elsewhere, and its standard error.
REFERENCE = {
    "d4rl/Hopper-v2": (1389, 22),
    "d4rl/Walker2d-v2": (2743, 64),
    "d4rl/HalfCheetah-v2": (4778, 22),
}


def main() -> None:
    pairs = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    print("| set | episodes | steps | mean return ± s.e. | reference | apart by | score | engine |")
    print("|---|---|---|---|---|---|---|---|")
    for _, folder in pairs:
        print(summary(Store(folder)))
    for file, folder in pairs:
        print(f"\n{Path(file).name}: states, mean ± std per dimension\n")
        compare(Path(file), Store(folder))


def summary(store: Store) -> str:
    assert store.header.env
    returns = store.episode_returns
    mean, error = returns.mean(), standard_error(returns)
    reference, reference_error = REFERENCE[store.header.env]
    score = normalised_score(store.header.env, float(mean))
    return (
        f"| {store.header.source['name']} | {len(returns)} | {store.totals.steps} "
        f"| {mean:.0f} ± {error:.0f} | {reference} ± {reference_error} "
        f"| {distance(store):.1f} s.e. | {score:.1f} | {store.header.source['engine']} |"
    )


def distance(store: Store) -> float:
    """Distance of the mean return from the reference, in standard errors of the difference."""
    assert store.header.env
    reference, error = REFERENCE[store.header.env]
    returns = store.episode_returns
    return float(abs(returns.mean() - reference) / np.hypot(error, standard_error(returns)))


def standard_error(returns: NDArray[np.float64]) -> float:
    return float(returns.std(ddof=1) / len(returns) ** 0.5)


def compare(file: Path, store: Store) -> None:
    with h5py.File(file) as recorded:
        states = recorded["observations"][()].astype(np.float64)
    own = statistics(store).states
    print("| dimension | regenerated | recorded episodes |")
    print("|---|---|---|")
    for i in range(states.shape[1]):
        print(
            f"| {i} | {own.mean[i]:.2f} ± {own.std[i]:.2f} "
            f"| {states[:, i].mean():.2f} ± {states[:, i].std():.2f} |"
        )


if __name__ == "__main__":
    main()
