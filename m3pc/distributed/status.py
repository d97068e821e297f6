"""A run in the numbers that people look at."""

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from m3pc.telemetry.catalogue import (
    ALPHA,
    BATCH_ROWS,
    COLLECTED_SHARE,
    ENTROPY,
    ENV_STEPS,
    PLAN_SECONDS,
    PLANNER_VERSION,
    QUEUE_ROWS,
    STALENESS,
)
from m3pc.telemetry.recorder import METRICS, Snapshot, mean, quantile, share_above, value

if TYPE_CHECKING:
    from actors.reports import RolloutReport
    from m3pc.distributed.driver import Driver
    from m3pc.distributed.rollout_supervisor import SupervisedRolloutWorker
    from m3pc.distributed.supervisor import SupervisedProcess


def describe(driver: "Driver") -> dict[str, Any]:
    fleet, config = driver.fleet, driver.run.config
    stored, learnt, snapshot = fleet.stored, fleet.learnt, fleet.snapshot()
    returns = [episode.total for episode in fleet.finished if episode.outcome != "aborted"]
    actors = [_actor(actor) for actor in fleet.actors.values()]
    return {
        "state": driver.phase,
        "steps": stored.steps if stored else 0,
        "of": config.online.steps,
        "episodes": stored.episodes if stored else 0,
        "steps_per_second": driver.rate.add(time.monotonic(), stored.steps if stored else 0),
        "return": float(np.mean(returns)) if returns else math.nan,
        "best": max(returns, default=math.nan),
        "updates": learnt.updates if learnt else 0,
        "version": value(snapshot, PLANNER_VERSION),
        "owed": driver.owed,
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
        "processes": [*(_process(seat) for seat in fleet.parts), *actors],
        "evaluation": driver.examiner.rows[-20:],
    }


def _process(seat: "SupervisedProcess") -> dict[str, Any]:
    home = seat.home
    return {
        "name": seat.name,
        "state": seat.state,
        "pid": home.pid if home else None,
        "node": home.node if home else None,
        "restarts": seat.restarts.count,
        "reason": seat.reason,  # of the last end
    }


def _actor(actor: "SupervisedRolloutWorker") -> dict[str, Any]:
    report: RolloutReport | None = actor.report
    if report is None or actor.state != "up":
        return _process(actor)
    doing = {"state": report.state, "steps": value(report.snapshot, ENV_STEPS)}
    return _process(actor) | doing


def log_line(snapshot: Snapshot) -> dict[str, float]:
    """All counters and gauges, and three quantiles of each histogram, by their names."""
    found: dict[str, float] = {}
    for name, labels in snapshot.items():
        for label in labels:
            key = f"{name}/{label}" if label else name
            if METRICS[name].kind == "histogram":
                for share in (0.5, 0.99, 1.0):
                    found[f"{key}/p{100 * share:g}"] = quantile(
                        snapshot, METRICS[name], share, label
                    )
            else:
                found[key] = value(snapshot, METRICS[name], label)
    return found


class RateMeter:
    """Of a count, over the last half minute."""

    def __init__(self, seconds: float = 30.0) -> None:
        self._seconds = seconds
        self._points: list[tuple[float, int]] = []

    def add(self, now: float, count: int) -> float:
        self._points.append((now, count))
        while len(self._points) > 2 and self._points[1][0] <= now - self._seconds:
            self._points.pop(0)
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / (last - first) if last > first else 0.0
