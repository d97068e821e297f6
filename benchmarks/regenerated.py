"""Regenerated data beside the recorded episodes: returns, and every state dimension.

    python -m benchmarks.regenerated FILE.hdf5 STORE [FILE.hdf5 STORE ...]

FILE is a D4RL file with its behaviour policy, STORE what `m3pc data regenerate` made of it. Prints
the tables of docs/results/data.md.
"""

import sys
from pathlib import Path

import h5py
import numpy as np

from m3pc.envs import normalised_score
from replay.statistics import statistics
from replay.store import Store


def main() -> None:
    pairs = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    print("| set | episodes | steps | mean return ± s.e. | normalised | engine |")
    print("|---|---|---|---|---|---|")
    for _, folder in pairs:
        print(summary(Store(folder)))
    for file, folder in pairs:
        print(f"\n{Path(file).name}: states, mean ± std per dimension\n")
        compare(Path(file), Store(folder))


def summary(store: Store) -> str:
    returns = store.episode_returns
    error = returns.std(ddof=1) / len(returns) ** 0.5
    assert store.header.env
    score = normalised_score(store.header.env, float(returns.mean()))
    return (
        f"| {store.header.source['name']} | {len(returns)} | {store.totals.steps} "
        f"| {returns.mean():.0f} ± {error:.0f} | {score:.1f} | {store.header.source['engine']} |"
    )


def compare(file: Path, store: Store) -> None:
    with h5py.File(file) as recorded:
        real = recorded["observations"][()].astype(np.float64)
    ours = statistics(store).states
    print("| dimension | regenerated | recorded episodes |")
    print("|---|---|---|")
    for i in range(real.shape[1]):
        print(
            f"| {i} | {ours.mean[i]:.2f} ± {ours.std[i]:.2f} "
            f"| {real[:, i].mean():.2f} ± {real[:, i].std():.2f} |"
        )


if __name__ == "__main__":
    main()
