"""Results that people would rather see than read, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, ACCENT, SOFT = "#22303c", "#1f77b4", "#c9d6df"


def return_histogram(path: Path, returns: NDArray[np.float64], *, title: str) -> None:
    """How many episodes reached which return, and where the mean and the best lie."""
    figure, axes = _page(title)
    axes.hist(returns, bins=min(60, max(8, int(len(returns) ** 0.5) * 2)), color=ACCENT, alpha=0.85)
    for value, label, style in ((returns.mean(), "mean", "--"), (returns.max(), "best", ":")):
        axes.axvline(value, color=INK, linewidth=1, linestyle=style, label=f"{label} {value:.0f}")
    axes.set(xlabel="return of an episode", ylabel="episodes")
    axes.legend(frameon=False)
    _save(figure, path)


def learning_curve(
    path: Path,
    *,
    title: str,
    steps: Sequence[int],
    evaluated: Sequence[float],
    episode_ends: Sequence[int],
    episode_returns: Sequence[float],
    target: float,
) -> None:
    """Evaluated return and every training episode's, against environment steps."""
    figure, axes = _page(title)
    axes.scatter(episode_ends, episode_returns, s=5, color=SOFT, label="training episode")
    axes.plot(steps, evaluated, color=ACCENT, marker="o", markersize=3, label="evaluation (mean)")
    axes.axhline(
        target, color=INK, linewidth=1, linestyle="--", label=f"stated return {target:.0f}"
    )
    axes.set(xlabel="environment steps", ylabel="return")
    axes.legend(frameon=False)
    _save(figure, path)


def returns_by_candidates(
    path: Path, curves: Mapping[str, Sequence[tuple[float, float, float]]], *, title: str
) -> None:
    """Return against the effective number of candidates: points (candidates, return, error)."""
    figure, axes = _page(title)
    for label, points in curves.items():
        x, y, error = zip(*sorted(points), strict=True)
        axes.errorbar(x, y, yerr=error, marker="o", markersize=3, linewidth=1, label=label)
    axes.set(xlabel="effective number of candidates", ylabel="return of an episode")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    _save(figure, path)


def loss_curves(
    path: Path, lines: Mapping[str, tuple[Sequence[int], Sequence[float]]], *, title: str
) -> None:
    """Losses or errors by update, on a logarithmic scale."""
    figure, axes = _page(title)
    for label, (updates, values) in lines.items():
        style = "--" if label.startswith("held-out") else "-"
        axes.plot(updates, values, linewidth=1, linestyle=style, label=label)
    axes.set(xlabel="updates", ylabel="squared error, normalised", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _page(title: str) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
