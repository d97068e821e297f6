"""Metrics that only the driver of a run knows: processes that are up, progress, returns."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from actors.reports import FinishedEpisode
from m3pc.distributed.run_view import ProcessView, RunView
from m3pc.telemetry.catalogue import (
    ACTOR_UP,
    ENTROPY_BOUND,
    EVALUATION_RETURN,
    EVALUATION_SCORE,
    EVALUATION_STEPS,
    PARTS,
    PARTS_PARKED,
    PARTS_UP,
    PARTS_WANTED,
    PHASE,
    PLAN_RETURN,
    RECENT_RETURN,
    RUN_STEPS,
    RUN_STEPS_GOAL,
)
from m3pc.telemetry.recorder import MAX_SLOTS, Metric, Snapshot


def gauges(view: RunView) -> Snapshot:
    """Build all gauges anew, so that series of processes that are gone disappear."""
    snapshot: dict[str, dict[str, list[float]]] = {}

    def put(metric: Metric, values: Mapping[str, float | None]) -> None:
        """Leave out NaN and None (NaN as read from a file)."""
        known = {label: [x] for label, x in values.items() if x is not None and not math.isnan(x)}
        if known:
            snapshot[metric.name] = known

    processes = [*view.processes, *view.actors.values()]
    put(PHASE, {phase: float(phase == view.phase) for phase in PHASE.values})
    put(RUN_STEPS, {"": view.steps})
    put(RUN_STEPS_GOAL, {"": view.config.online.steps})
    put(PARTS_WANTED, _count_by_part(processes))
    put(PARTS_UP, _count_by_part([process for process in processes if process.is_working]))
    put(PARTS_PARKED, _count_by_part([p for p in processes if p.state == "parked"]))
    slots = {str(slot): float(actor.is_working) for slot, actor in view.actors.items()}
    put(ACTOR_UP, dict(list(slots.items())[:MAX_SLOTS]))
    episodes = view.complete_episodes
    if episodes:
        returns = [episode.total for episode in episodes]
        mean = float(np.mean(returns))
        put(RECENT_RETURN, {"mean": mean, "best": max(returns), "worst": min(returns)})
    put(PLAN_RETURN, _plan_returns(episodes))
    put(ENTROPY_BOUND, {"": view.config.entropy.target})
    if view.evaluations:
        last = view.evaluations[-1]
        put(EVALUATION_RETURN, {"mean": last["return"], "error": last["error"]})
        put(EVALUATION_SCORE, {"": last["score"]})
        put(EVALUATION_STEPS, {"": last["step"]})
    return snapshot


def missing(view: RunView) -> str:
    """Which processes a run lacks to be ready; "" if none."""
    away = [process.name for process in view.processes if not process.is_working]
    if view.phase == "collecting" and not any(a.is_working for a in view.actors.values()):
        away.append("every actor")
    return f"away: {', '.join(away)}" if away else ""


def _count_by_part(processes: Sequence[ProcessView]) -> dict[str, float]:
    parts = [process.part for process in processes]
    return {part: float(parts.count(part)) for part in PARTS}


def _plan_returns(episodes: Sequence[FinishedEpisode]) -> dict[str, float]:
    pairs = [(e.planned, e.realised) for e in episodes if math.isfinite(e.planned)]
    if not pairs:
        return {}
    planned, realised = np.mean(pairs, axis=0)
    return {"planned": float(planned), "realised": float(realised)}
