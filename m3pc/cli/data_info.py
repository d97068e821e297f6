"""The output of `m3pc data info`."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from replay.store.statistics import Moments, statistics
from replay.store.store import Store

BARS = 12  # bars in the histogram, one per line
BAR_WIDTH = 40  # length of the longest bar in characters


def as_json(store: Store) -> str:
    numbers = asdict(statistics(store)) if store.totals.episodes else None
    return json.dumps(_summary(store) | {"statistics": numbers}, default=_plain, indent=1)


def show(store: Store) -> None:
    console = Console(highlight=False)
    numbers = statistics(store) if store.totals.episodes else None
    summary = _summary(store)
    if numbers:
        summary["ended by"] = (
            f"task {numbers.terminated:,}, step limit {numbers.truncated:,}, cut {numbers.cut:,}"
        )
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)
    if numbers is None:
        return
    console.print(
        _moments_table(
            {"states": numbers.states, "actions": numbers.actions, "rewards": numbers.rewards}
        )
    )
    console.print(_histogram(store.episode_returns))


def _summary(store: Store) -> dict[str, Any]:
    from m3pc.envs.scores import normalised_score

    returns, lengths = store.episode_returns, store.lengths
    header = store.header
    summary: dict[str, Any] = {
        "store": str(store.path),
        "environment": header.env or "unknown",
        "episodes": store.totals.episodes,
        "steps": store.totals.steps,
        "state, action sizes": f"{header.states}, {header.actions}",
        "step limit": header.max_episode_steps,
        "episode length": "none yet",
        "return": "none yet",
        "source": ", ".join(f"{key} {value}" for key, value in header.source.items()),
        "segments": store.totals.segments,
        "checksum": store.checksum,
    }
    if not store.totals.episodes:
        return summary
    summary["episode length"] = f"{lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}"
    summary["return"] = (
        f"{returns.min():.1f} to {returns.max():.1f}, "
        f"mean {returns.mean():.1f}, std {returns.std():.1f}"
    )
    score = normalised_score(header.env, float(returns.mean())) if header.env else None
    if score is not None:
        summary["normalised score"] = f"{score:.1f} (mean return; 0 random, 100 expert)"
    return summary


def _moments_table(columns: dict[str, Moments]) -> Table:
    table = Table("", "mean", "std", "min", "max", box=None)
    for name, moments in columns.items():
        for i in range(len(moments.mean)):
            row = (moments.mean[i], moments.std[i], moments.low[i], moments.high[i])
            table.add_row(f"{name}[{i}]", *(f"{value:.4f}" for value in row))
    return table


def _histogram(returns: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    counts, edges = np.histogram(returns, bins=BARS)
    lines = [
        f"{low:10.1f} .. {high:10.1f}  {'█' * round(BAR_WIDTH * count / counts.max())} {count}"
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    return "\n".join(["returns of episodes:", *lines])


def _plain(value: object) -> object:
    assert isinstance(value, np.ndarray), type(value)
    return value.tolist()
