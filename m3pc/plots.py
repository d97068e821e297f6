"""Figures of results, saved as PNG, PDF or SVG by the ending of the path."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, ACCENT, SOFT, ALARM = "#22303c", "#1f77b4", "#c9d6df", "#c0392b"
COLORS = (ACCENT, "#d9822b", "#4b9b6e", ALARM, "#7a5ba6", "#8c6d46")  # one per compared planner
MAX_DOTS = 60  # subgoals that are drawn
MAX_TOLERANCES = 12  # tolerances above and below a goal that are shown
MIN_CELLS, MAX_CELLS = 10, 24  # cells along each axis of a 2-D histogram
MIN_COLOR_SCALE = 4  # episodes: the darkest colour stands for this many or more


class RunPanel(NamedTuple):
    """Episodes of one run: at which step each ended, and its return or success."""

    title: str
    ends: NDArray[np.int64]  # [K] environment steps
    values: NDArray[np.float64]  # [K]
    steps: int  # length of the run
    level: float | None  # the offline model's, for comparison


class TrackedDimension(NamedTuple):
    """One dimension of a state over the steps of episodes, and its goal. K episodes, P steps."""

    title: str
    unit: str  # name and unit of the dimension
    steps: NDArray[np.int64]  # [P]
    goal: NDArray[np.float64]  # [P]
    subgoals: tuple[NDArray[np.float64], NDArray[np.float64]]  # steps and goals; may be empty
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
    """Histogram of episode returns, with mean and maximum marked."""
    figure, axes = new_figure(title)
    axes.hist(returns, bins=min(60, max(8, int(len(returns) ** 0.5) * 2)), color=ACCENT, alpha=0.85)
    for value, label, style in ((returns.mean(), "mean", "--"), (returns.max(), "best", ":")):
        axes.axvline(value, color=INK, linewidth=1, linestyle=style, label=f"{label} {value:.0f}")
    axes.set(xlabel="return of an episode", ylabel="episodes")
    axes.legend(frameon=False)
    save(figure, path)


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
    """Returns of evaluations and of training episodes, against environment steps."""
    figure, axes = new_figure(title)
    axes.scatter(episode_ends, episode_returns, s=5, color=SOFT, label="training episode")
    axes.plot(steps, evaluated, color=ACCENT, marker="o", markersize=3, label="evaluation (mean)")
    axes.axhline(
        target, color=INK, linewidth=1, linestyle="--", label=f"target return {target:.0f}"
    )
    axes.set(xlabel="environment steps", ylabel="return")
    axes.legend(frameon=False)
    save(figure, path)


def loss_curves(
    path: Path, lines: Mapping[str, tuple[Sequence[int], Sequence[float]]], *, title: str
) -> None:
    """Losses or errors by update, on a logarithmic scale; held-out ones are dashed."""
    figure, axes = new_figure(title)
    for label, (updates, values) in lines.items():
        style = "--" if label.startswith("held-out") else "-"
        axes.plot(updates, values, linewidth=1, linestyle=style, label=label)
    axes.set(xlabel="updates", ylabel="squared error, normalised", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)


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
    """Evaluations with 95 % intervals, and below them the entropy with its bound."""
    figure, (above, below) = new_grid(2, 1, size=(7, 5.5), heights=(2, 1), share_x=True)
    mean, error = np.asarray(values), np.asarray(errors)
    above.fill_between(steps, mean - 1.96 * error, mean + 1.96 * error, color=SOFT, alpha=0.7)
    above.plot(steps, mean, color=ACCENT, marker="o", markersize=3, label="mean, 95 % interval")
    draw_level(above, level, "offline")
    above.set(ylabel=f"{unit} in evaluation")
    above.set_title(title, fontsize=10)
    above.legend(frameon=False, fontsize=8)
    if entropies:
        below.plot(*zip(*entropies, strict=True), color=ACCENT, linewidth=1, label="entropy")
    below.axhline(bound, color=INK, linewidth=1, linestyle=":", label=f"bound {bound:g}")
    below.set(xlabel="environment steps", ylabel="entropy")
    below.legend(frameon=False, fontsize=8)
    save(figure, path)


def exploration(path: Path, panels: Sequence[RunPanel], *, unit: str) -> None:
    """Histograms of episodes by step and value: a panel per run, on the same scales."""
    from matplotlib.ticker import MaxNLocator

    figure, grid = new_grid(
        1, len(panels), size=(max(7.0, 5.0 * len(panels)), 4), share_x=True, share_y=True
    )
    values = np.concatenate([panel.values for panel in panels])
    levels = [panel.level for panel in panels if panel.level is not None]
    low, high = min([*values, *levels]), max([*values, *levels])
    margin = 0.04 * (high - low) or 1.0
    root = max(len(panel.values) for panel in panels) ** 0.5
    row_cells, column_cells = (
        int(np.clip(cells, MIN_CELLS, MAX_CELLS)) for cells in (2 * root, root)
    )
    rows = np.linspace(low - margin, high + margin, row_cells + 1)
    columns = np.linspace(0, max(panel.steps for panel in panels), column_cells + 1)
    counts = [np.histogram2d(p.ends, p.values, bins=(columns, rows))[0] for p in panels]
    max_count = max(MIN_COLOR_SCALE, *(float(count.max()) for count in counts))
    for axes, panel, count in zip(grid, panels, counts, strict=True):
        mesh = axes.pcolormesh(
            columns, rows, np.ma.masked_equal(count.T, 0), cmap="Blues", vmin=0, vmax=max_count
        )
        _medians(axes, panel, columns)
        draw_level(axes, panel.level, "offline")
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set(xlabel="environment steps")
        axes.legend(  # above the cells
            frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=2
        )
    grid[0].set_ylabel(f"{unit} of an episode")
    bar = figure.colorbar(mesh, ax=list(grid), label="episodes")
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()
    save(figure, path)


def tracking(path: Path, panels: Sequence[TrackedDimension]) -> None:
    """A panel per dimension: the goal with its subgoals, median and 80 % of the episodes."""
    figure, grid = new_grid(len(panels), 1, size=(8, 0.6 + 2.6 * len(panels)))
    for axes, panel in zip(grid, panels, strict=True):
        for (label, values), color in zip(panel.lines.items(), COLORS, strict=False):
            low, median, high = np.percentile(values, [10, 50, 90], axis=0)
            axes.fill_between(panel.steps, low, high, color=color, alpha=0.18, linewidth=0)
            axes.plot(panel.steps, median, color=color, linewidth=1.4, label=label)
        axes.plot(panel.steps, panel.goal, color=INK, linewidth=1, linestyle="--", label="wanted")
        x, y = (values[:: 1 + len(values) // MAX_DOTS] for values in panel.subgoals)
        axes.plot(x, y, color=INK, linestyle="", marker="o", markersize=3)
        axes.set(ylabel=panel.unit, xlim=(0, panel.steps[-1]))
        low, high = axes.get_ylim()  # crops falls, which would make the goal look flat
        room = MAX_TOLERANCES * panel.tolerance
        axes.set_ylim(max(low, panel.goal.min() - room), min(high, panel.goal.max() + room))
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.legend(  # above the lines
            frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3
        )
    dots = "dots: subgoals; " if any(len(panel.subgoals[0]) for panel in panels) else ""
    grid[-1].set_xlabel(f"step ({dots}line and band: median and 80 % of episodes)")
    save(figure, path)


def planes(path: Path, panels: Sequence[PlanePath], *, explained: tuple[float, float]) -> None:
    """Data, goals and visited states in the plane: a panel per path, on the same scales."""
    size = (max(7.0, 5.0 * len(panels)), 5)
    figure, grid = new_grid(1, len(panels), size=size, share_x=True, share_y=True)
    for axes, panel in zip(grid, panels, strict=True):
        x, y = panel.data.T
        axes.scatter(x, y, s=3, color=SOFT, linewidths=0, label="data")
        for (label, points), color in zip(panel.clouds.items(), COLORS, strict=False):
            x, y = points.T
            axes.scatter(x, y, s=3, color=color, alpha=0.35, linewidths=0, label=label)
        x, y = panel.goals.T
        axes.scatter(x, y, s=6, color=INK, linewidths=0, label=panel.goals_label)
        axes.plot(x[-1], y[-1], color=INK, linestyle="", marker="*", markersize=7, label="the last")
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_xlabel(f"first component, {100 * explained[0]:.0f} % of the variance")
        legend = axes.legend(
            frameon=False,
            fontsize=8,
            markerscale=2,
            title="at: median distance to the data,\nin typical distances within it",
            title_fontsize=8,
            alignment="left",
        )
        for handle in filter(None, legend.legend_handles):
            handle.set_alpha(1)
    grid[0].set_ylabel(f"second component, {100 * explained[1]:.0f} %")
    save(figure, path)


def filmstrip(
    path: Path,
    rows: Mapping[str, Sequence[tuple[int, NDArray[np.uint8]]]],
    *,
    title: str,
) -> None:
    """A row per label: frames [height, width, 3] with the step of each."""
    columns = max(len(frames) for frames in rows.values())
    figure, grid = new_grid(len(rows), columns, size=(1.5 * columns, 0.5 + 1.7 * len(rows)))
    for axes in grid:
        axes.set_axis_off()
    for number, (label, frames) in enumerate(rows.items()):
        for axes, (step, frame) in zip(grid[number * columns :], frames, strict=False):
            axes.imshow(frame)
            axes.set_title(f"{step}", fontsize=8)
        grid[number * columns].set_title(f"{label}, step {frames[0][0]}", fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def outcomes_by_variant(
    path: Path, variants: Mapping[str, tuple[NDArray[np.int64], int]], *, title: str
) -> None:
    """Success rates and lengths; each variant has (lengths [K], number of successes)."""
    figure, (left, right) = new_grid(1, 2, size=(8, 1.2 + 0.5 * len(variants)), share_y=True)
    rows = np.arange(len(variants))[::-1]  # the first on top
    for row, (lengths, successes) in zip(rows, variants.values(), strict=True):
        share = successes / len(lengths)
        left.barh(row, share, height=0.6, color=ACCENT)
        left.text(share + 0.02, row, f"{successes} of {len(lengths)}", va="center", fontsize=8)
        offsets = np.linspace(-0.25, 0.25, len(lengths)) if len(lengths) > 1 else np.zeros(1)
        right.scatter(lengths, row + offsets, s=6, color=ACCENT, alpha=0.5, linewidths=0)
        right.plot([np.median(lengths)] * 2, [row - 0.35, row + 0.35], color=INK, linewidth=1.5)
    left.set_yticks(rows, list(variants))
    left.set(xlabel="share that succeeded", xlim=(0, 1.25), xticks=(0, 0.5, 1))
    right.set(xlabel="steps of an episode (line: median)")
    right.set_xlim(left=0)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def _medians(axes: "Axes", panel: RunPanel, columns: NDArray[np.float64]) -> None:
    """Draw the median of the episodes that ended in each column."""
    where = np.digitize(panel.ends, columns[1:-1], right=True)
    middles = (columns[1:] + columns[:-1]) / 2
    points = [(middles[n], np.median(panel.values[where == n])) for n in np.unique(where)]
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=INK, linewidth=1.2, marker="o", markersize=2.5, label="median")


def draw_level(axes: "Axes", level: float | None, name: str) -> None:
    """Draw a horizontal line for comparison, if there is a level."""
    if level is not None:
        label = f"{name} {level:.1f}"
        axes.axhline(level, color=ALARM, linewidth=1.2, linestyle="--", label=label)


def new_figure(title: str) -> "tuple[Figure, Axes]":
    """A figure with one panel."""
    figure, (axes,) = new_grid(1, 1, size=(7, 4))
    axes.set_title(title, fontsize=10)
    return figure, axes


def new_grid(
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
    grid: list[Axes] = table.ravel().tolist()
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
