"""Results that people would rather see than read, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, ACCENT, SOFT, ALARM = "#22303c", "#1f77b4", "#c9d6df", "#c0392b"
COLORS = (ACCENT, "#d9822b", "#4b9b6e", ALARM, "#7a5ba6", "#8c6d46")  # of planners, side by side
MOST_DOTS = 60  # subgoals that are shown
WIDEST = 12  # times the tolerance that is shown around a goal
FEWEST, MOST = 10, 24  # cells of a two-dimensional histogram along each axis
DARKEST = 4  # episodes in a cell, at least, that make it as dark as can be


class GoalPanel(NamedTuple):
    """Episodes of one run: where each ended, and how well."""

    title: str
    ends: NDArray[np.int64]  # [K] environment steps
    values: NDArray[np.float64]  # [K]
    steps: int  # of the whole run
    level: float | None  # to compare with


class Curves(NamedTuple):
    """Learning curves of runs that differ in their seed."""

    title: str
    runs: Sequence[tuple[Sequence[float], Sequence[float]]]  # steps and values of each
    level: float  # to compare with


class TrackedDimension(NamedTuple):
    """One number of a state over the steps of episodes, and what it should have been."""

    title: str
    unit: str  # what the number is
    steps: NDArray[np.int64]  # [P]
    goal: NDArray[np.float64]  # [P]
    subgoals: tuple[NDArray[np.float64], NDArray[np.float64]]  # steps, and the goal there; or none
    lines: Mapping[str, NDArray[np.float64]]  # by label, [K, P]
    tolerance: float


class PlanePath(NamedTuple):
    """States in the plane of a data set's first two principal components, each [N, 2]."""

    title: str
    data: NDArray[np.float64]
    goals: NDArray[np.float64]  # in the order of the steps
    goals_label: str
    clouds: Mapping[str, NDArray[np.float64]]  # by label


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


def online_curve(
    path: Path,
    *,
    title: str,
    unit: str,
    steps: Sequence[int],
    values: Sequence[float],
    errors: Sequence[float],
    level: float | None,
    entropies: Sequence[tuple[int, float]],
    bound: float,
) -> None:
    """Evaluations with their standard errors, and below them entropy against its bound."""
    figure, (above, below) = _pages(2, 1, size=(7, 5.5), heights=(2, 1), share_x=True)
    mean, error = np.asarray(values), np.asarray(errors)
    above.fill_between(steps, mean - 1.96 * error, mean + 1.96 * error, color=SOFT, alpha=0.7)
    above.plot(steps, mean, color=ACCENT, marker="o", markersize=3, label="mean, 95 % interval")
    _level(above, level, "offline")
    above.set(ylabel=f"{unit} in evaluation")
    above.set_title(title, fontsize=10)
    above.legend(frameon=False, fontsize=8)
    if entropies:
        below.plot(*zip(*entropies, strict=True), color=ACCENT, linewidth=1, label="entropy")
    below.axhline(bound, color=INK, linewidth=1, linestyle=":", label=f"bound {bound:g}")
    below.set(xlabel="environment steps", ylabel="entropy")
    below.legend(frameon=False, fontsize=8)
    _save(figure, path)


def exploration(path: Path, panels: Sequence[GoalPanel], *, unit: str) -> None:
    """How many episodes reached what when: a panel a run, on the same scales."""
    from matplotlib.ticker import MaxNLocator

    figure, pages = _pages(
        1, len(panels), size=(max(7.0, 5.0 * len(panels)), 4), share_x=True, share_y=True
    )
    values = np.concatenate([panel.values for panel in panels])
    levels = [panel.level for panel in panels if panel.level is not None]
    low, high = min([*values, *levels]), max([*values, *levels])
    margin = 0.04 * (high - low) or 1.0
    root = max(len(panel.values) for panel in panels) ** 0.5
    rows = np.linspace(low - margin, high + margin, _cells(2 * root) + 1)
    columns = np.linspace(0, max(panel.steps for panel in panels), _cells(root) + 1)
    counts = [np.histogram2d(p.ends, p.values, bins=(columns, rows))[0] for p in panels]
    highest = max(DARKEST, *(float(count.max()) for count in counts))
    for page, panel, count in zip(pages, panels, counts, strict=True):
        mesh = page.pcolormesh(
            columns, rows, np.ma.masked_equal(count.T, 0), cmap="Blues", vmin=0, vmax=highest
        )
        _medians(page, panel, columns)
        _level(page, panel.level, "offline")
        page.set_title(panel.title, fontsize=10, loc="left")
        page.set(xlabel="environment steps")
        page.legend(  # above the cells, not on them
            frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=2
        )
    pages[0].set_ylabel(f"{unit} of an episode")
    bar = figure.colorbar(mesh, ax=list(pages), label="episodes")
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()
    _save(figure, path)


def curves_by_seed(path: Path, panels: Sequence[Curves], *, unit: str) -> None:
    """A panel a set: each seed thin, their mean thick, the level that they started from dashed."""
    figure, pages = _pages(1, len(panels), size=(max(7.0, 5.0 * len(panels)), 4))
    for page, panel in zip(pages, panels, strict=True):
        for steps, values in panel.runs:
            page.plot(steps, values, color=ACCENT, linewidth=0.8, alpha=0.45)
        grid = np.unique(np.concatenate([steps for steps, _ in panel.runs]))
        grid = grid[grid <= min(max(steps) for steps, _ in panel.runs)]
        mean = np.mean([np.interp(grid, *run) for run in panel.runs], axis=0)
        label = f"mean of {len(panel.runs)} training seeds" if len(panel.runs) > 1 else "one seed"
        page.plot(grid, mean, color=ACCENT, linewidth=2, label=label)
        _level(page, panel.level, "offline")
        page.set_title(panel.title, fontsize=10)
        page.set(xlabel="environment steps")
        page.legend(frameon=False, fontsize=8)
    pages[0].set_ylabel(f"{unit} in evaluation")
    _save(figure, path)


def tracking(path: Path, panels: Sequence[TrackedDimension]) -> None:
    """A panel each: the goal with its subgoals, and the median and four fifths of the episodes."""
    figure, pages = _pages(len(panels), 1, size=(8, 0.6 + 2.6 * len(panels)))
    for page, panel in zip(pages, panels, strict=True):
        for (label, values), color in zip(panel.lines.items(), COLORS, strict=False):
            low, median, high = np.percentile(values, [10, 50, 90], axis=0)
            page.fill_between(panel.steps, low, high, color=color, alpha=0.18, linewidth=0)
            page.plot(panel.steps, median, color=color, linewidth=1.4, label=label)
        page.plot(panel.steps, panel.goal, color=INK, linewidth=1, linestyle="--", label="wanted")
        x, y = (values[:: 1 + len(values) // MOST_DOTS] for values in panel.subgoals)
        page.plot(x, y, color=INK, linestyle="", marker="o", markersize=3)
        page.set(ylabel=panel.unit, xlim=(0, panel.steps[-1]))
        low, high = page.get_ylim()  # whoever falls leaves the picture, or the goal would be flat
        room = WIDEST * panel.tolerance
        page.set_ylim(max(low, panel.goal.min() - room), min(high, panel.goal.max() + room))
        page.set_title(panel.title, fontsize=10, loc="left")
        page.legend(  # above the lines, not on them
            frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3
        )
    dots = "dots: subgoals; " if any(len(panel.subgoals[0]) for panel in panels) else ""
    pages[-1].set_xlabel(f"step ({dots}line and band: median and 80 % of episodes)")
    _save(figure, path)


def planes(path: Path, panels: Sequence[PlanePath], *, explained: tuple[float, float]) -> None:
    """A panel each, on the same scales."""
    size = (max(7.0, 5.0 * len(panels)), 5)
    figure, pages = _pages(1, len(panels), size=size, share_x=True, share_y=True)
    for page, panel in zip(pages, panels, strict=True):
        x, y = panel.data.T
        page.scatter(x, y, s=3, color=SOFT, linewidths=0, label="data")
        for (label, points), color in zip(panel.clouds.items(), COLORS, strict=False):
            x, y = points.T
            page.scatter(x, y, s=3, color=color, alpha=0.35, linewidths=0, label=label)
        x, y = panel.goals.T
        page.scatter(x, y, s=6, color=INK, linewidths=0, label=panel.goals_label)
        page.plot(x[-1], y[-1], color=INK, linestyle="", marker="*", markersize=7, label="the last")
        page.set_title(panel.title, fontsize=10, loc="left")
        page.set_xlabel(f"first component, {100 * explained[0]:.0f} % of the variance")
        legend = page.legend(
            frameon=False,
            fontsize=8,
            markerscale=2,
            title="at: median distance to the data,\nin typical distances within it",
            title_fontsize=8,
            alignment="left",
        )
        for handle in filter(None, legend.legend_handles):
            handle.set_alpha(1)
    pages[0].set_ylabel(f"second component, {100 * explained[1]:.0f} %")
    _save(figure, path)


def filmstrip(
    path: Path,
    rows: Mapping[str, Sequence[tuple[int, NDArray[np.uint8]]]],
    *,
    title: str,
) -> None:
    """A row a label: pictures [height, width, 3], each with the step that it was taken at."""
    columns = max(len(frames) for frames in rows.values())
    figure, pages = _pages(len(rows), columns, size=(1.5 * columns, 0.5 + 1.7 * len(rows)))
    for page in pages:
        page.set_axis_off()
    for number, (label, frames) in enumerate(rows.items()):
        for page, (step, frame) in zip(pages[number * columns :], frames, strict=False):
            page.imshow(frame)
            page.set_title(f"{step}", fontsize=8)
        pages[number * columns].set_title(f"{label}, step {frames[0][0]}", fontsize=8)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def played_by_role(
    path: Path, roles: Mapping[str, tuple[NDArray[np.int64], int]], *, title: str
) -> None:
    """How long each role's episodes were, and how many of them succeeded: lengths [K], a count."""
    figure, (left, right) = _pages(1, 2, size=(8, 1.2 + 0.5 * len(roles)), share_y=True)
    rows = np.arange(len(roles))[::-1]  # the first on top
    for row, (lengths, successes) in zip(rows, roles.values(), strict=True):
        share = successes / len(lengths)
        left.barh(row, share, height=0.6, color=ACCENT)
        left.text(share + 0.02, row, f"{successes} of {len(lengths)}", va="center", fontsize=8)
        spread = np.linspace(-0.25, 0.25, len(lengths)) if len(lengths) > 1 else np.zeros(1)
        right.scatter(lengths, row + spread, s=6, color=ACCENT, alpha=0.5, linewidths=0)
        right.plot([np.median(lengths)] * 2, [row - 0.35, row + 0.35], color=INK, linewidth=1.5)
    left.set_yticks(rows, list(roles))
    left.set(xlabel="share that succeeded", xlim=(0, 1.25), xticks=(0, 0.5, 1))
    right.set(xlabel="steps of an episode (line: median)")
    right.set_xlim(left=0)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def success_rates(
    path: Path, groups: Mapping[str, Mapping[str, Sequence[float]]], *, title: str
) -> None:
    """A group of bars a task, a bar a planner: the mean of shares, one a training seed."""
    figure, axes = _page(title)
    planners = list(dict.fromkeys(name for found in groups.values() for name in found))
    width = 0.8 / len(planners)
    for number, planner in enumerate(planners):
        places = np.arange(len(groups)) + (number - (len(planners) - 1) / 2) * width
        color = COLORS[number % len(COLORS)]
        for place, found in zip(places, groups.values(), strict=True):
            shares = found.get(planner, ())
            if len(shares):
                axes.bar(place, np.mean(shares), width, color=color, alpha=0.6)
                axes.plot([place] * len(shares), shares, "o", color=INK, markersize=4)
        axes.bar([0], [0], width, color=color, alpha=0.6, label=planner)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of trials that succeeded")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    _save(figure, path)


def _cells(wanted: float) -> int:
    return int(np.clip(wanted, FEWEST, MOST))


def _medians(axes: "Axes", panel: GoalPanel, columns: NDArray[np.float64]) -> None:
    """Of the episodes that ended in each column."""
    where = np.digitize(panel.ends, columns[1:-1], right=True)
    middles = (columns[1:] + columns[:-1]) / 2
    points = [(middles[n], np.median(panel.values[where == n])) for n in np.unique(where)]
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=INK, linewidth=1.2, marker="o", markersize=2.5, label="median")


def _level(axes: "Axes", level: float | None, name: str) -> None:
    if level is not None:
        label = f"{name} {level:.1f}"
        axes.axhline(level, color=ALARM, linewidth=1.2, linestyle="--", label=label)


def _page(title: str) -> "tuple[Figure, Axes]":
    figure, (axes,) = _pages(1, 1, size=(7, 4))
    axes.set_title(title, fontsize=10)
    return figure, axes


def _pages(
    rows: int,
    columns: int,
    *,
    size: tuple[float, float],
    heights: Sequence[float] | None = None,
    share_x: bool = False,
    share_y: bool = False,
) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=size, layout="constrained")
    table = figure.subplots(
        rows, columns, sharex=share_x, sharey=share_y, squeeze=False, height_ratios=heights
    )
    pages: list[Axes] = table.ravel().tolist()
    for axes in pages:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, pages


def _save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
