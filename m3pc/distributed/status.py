"""The status of a run as `m3pc status` and the terminal show it, and its line in the log."""

import math
from typing import Any

import numpy as np

from m3pc.distributed.run_view import ProcessView, RunView
from m3pc.telemetry.catalogue import (
    ALPHA,
    BATCH_ROWS,
    COLLECTED_SHARE,
    ENTROPY,
    PLAN_SECONDS,
    PLANNER_VERSION,
    QUEUE_ROWS,
    STALENESS,
)
from m3pc.telemetry.recorder import METRICS, Snapshot, mean, quantile, share_above, value


def describe(view: RunView) -> dict[str, Any]:
    """The content of status.json; the driver adds the fields of its own process."""
    config, stored, snapshot = view.config, view.stored, view.snapshot
    returns = [episode.total for episode in view.complete_episodes]
    actors = [_process(actor) for actor in view.actors.values()]
    return {
        "state": view.phase,
        "steps": view.steps,
        "of": config.online.steps,
        "episodes": stored.episodes if stored else 0,
        "steps_per_second": view.steps_per_second,
        "return": float(np.mean(returns)) if returns else math.nan,
        "best": max(returns, default=math.nan),
        "updates": view.learner.updates if view.learner else 0,
        "version": value(snapshot, PLANNER_VERSION),
        "owed": view.owed,
        "age": mean(snapshot, STALENESS),
        "oldest": quantile(snapshot, STALENESS, 1.0),
        "old_share": share_above(snapshot, STALENESS, config.online.stale_after),
        "collected_share": value(snapshot, COLLECTED_SHARE),
        "planner": {
            "p50": quantile(snapshot, PLAN_SECONDS, 0.5, "total"),
            "p99": quantile(snapshot, PLAN_SECONDS, 0.99, "total"),
            "batch": mean(snapshot, BATCH_ROWS),
            "queue": value(snapshot, QUEUE_ROWS),
        },
        "entropy": value(snapshot, ENTROPY),
        "target": config.entropy.target,
        "alpha": value(snapshot, ALPHA),
        "running": sum(actor["state"] == "running" for actor in actors),
        "wanted": len(actors),
        "processes": [*map(_process, view.processes), *actors],
        "evaluation": view.evaluations[-20:],
    }


def _process(view: ProcessView) -> dict[str, Any]:
    entry = {
        "name": view.name,
        "state": view.state,
        "pid": view.pid,
        "node": view.node,
        "restarts": view.restarts,
        "reason": view.reason,
    }
    return entry if view.env_steps is None else entry | {"steps": view.env_steps}


def log_line(snapshot: Snapshot) -> dict[str, float]:
    """All counters and gauges, and three quantiles of each histogram, by name."""
    line: dict[str, float] = {}
    for name, labels in snapshot.items():
        metric = METRICS[name]
        for label in labels:
            key = f"{name}/{label}" if label else name
            if metric.kind == "histogram":
                for share in (0.5, 0.99, 1.0):
                    line[f"{key}/p{100 * share:g}"] = quantile(snapshot, metric, share, label)
            else:
                line[key] = value(snapshot, metric, label)
    return line


class RateMeter:
    """The growth of a count per second, over the last half minute."""

    def __init__(self, seconds: float = 30.0) -> None:
        self._seconds = seconds
        self._points: list[tuple[float, int]] = []

    def add(self, now: float, count: int) -> float:
        self._points.append((now, count))
        while len(self._points) > 2 and self._points[1][0] <= now - self._seconds:
            self._points.pop(0)
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / (last - first) if last > first else 0.0
