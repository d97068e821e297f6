"""Figures that only benchmarks draw."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from m3pc.plots import ACCENT, COLORS, INK, draw_level, new_figure, new_grid, save


class Curves(NamedTuple):
    """Learning curves of runs that differ in their seed."""

    title: str
    runs: Sequence[tuple[Sequence[float], Sequence[float]]]  # steps and values of each
    level: float  # of the offline model, for comparison


def returns_by_candidates(
    path: Path, curves: Mapping[str, Sequence[tuple[float, float, float]]], *, title: str
) -> None:
    """Return against the effective number of candidates: points (candidates, return, error)."""
    figure, axes = new_figure(title)
    for label, points in curves.items():
        x, y, error = zip(*sorted(points), strict=True)
        axes.errorbar(x, y, yerr=error, marker="o", markersize=3, linewidth=1, label=label)
    axes.set(xlabel="effective number of candidates", ylabel="return of an episode")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    save(figure, path)


def curves_by_seed(path: Path, panels: Sequence[Curves], *, unit: str) -> None:
    """A panel per set: thin lines for seeds, a thick one for their mean, the first level dashed."""
    figure, grid = new_grid(1, len(panels), size=(max(7.0, 5.0 * len(panels)), 4))
    for axes, panel in zip(grid, panels, strict=True):
        for steps, values in panel.runs:
            axes.plot(steps, values, color=ACCENT, linewidth=0.8, alpha=0.45)
        shared_steps = np.unique(np.concatenate([steps for steps, _ in panel.runs]))
        shared_steps = shared_steps[shared_steps <= min(max(steps) for steps, _ in panel.runs)]
        mean = np.mean([np.interp(shared_steps, *run) for run in panel.runs], axis=0)
        label = f"mean of {len(panel.runs)} training seeds" if len(panel.runs) > 1 else "one seed"
        axes.plot(shared_steps, mean, color=ACCENT, linewidth=2, label=label)
        draw_level(axes, panel.level, "offline")
        axes.set_title(panel.title, fontsize=10)
        axes.set(xlabel="environment steps")
        axes.legend(frameon=False, fontsize=8)
    grid[0].set_ylabel(f"{unit} in evaluation")
    save(figure, path)


def success_rates(
    path: Path, groups: Mapping[str, Mapping[str, Sequence[float]]], *, title: str
) -> None:
    """Bars of mean success rates: a group per task, a bar per planner, a dot per training seed."""
    figure, axes = new_figure(title)
    planners = list(dict.fromkeys(name for shares in groups.values() for name in shares))
    width = 0.8 / len(planners)
    for number, planner in enumerate(planners):
        places = np.arange(len(groups)) + (number - (len(planners) - 1) / 2) * width
        color = COLORS[number % len(COLORS)]
        for place, by_planner in zip(places, groups.values(), strict=True):
            shares = by_planner.get(planner, ())
            if len(shares):
                axes.bar(place, np.mean(shares), width, color=color, alpha=0.6)
                axes.plot([place] * len(shares), shares, "o", color=INK, markersize=4)
        axes.bar([0], [0], width, color=color, alpha=0.6, label=planner)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of trials that succeeded")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    save(figure, path)
