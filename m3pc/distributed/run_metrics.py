"""What only the driver of a run knows, as metrics: who is up, how far it is, how good it is."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from m3pc.telemetry.catalogue import (
    ACTOR_UP,
    ENTROPY_BOUND,
    EVALUATED,
    EVALUATED_SCORE,
    EVALUATED_STEPS,
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
from m3pc.telemetry.recorder import MOST_SLOTS, Metric, Snapshot

if TYPE_CHECKING:
    from actors.reports import FinishedEpisode
    from m3pc.distributed.driver import Driver
    from m3pc.distributed.supervisor import SupervisedProcess


def gauges(driver: "Driver") -> Snapshot:
    """Made anew each time: what nobody has any more is not told any more."""
    fleet, config = driver.fleet, driver.run.config
    found: dict[str, dict[str, list[float]]] = {}

    def put(metric: Metric, values: Mapping[str, float | None]) -> None:
        """What is no number, None where it was read from a file, is not told."""
        known = {label: [x] for label, x in values.items() if x is not None and not math.isnan(x)}
        if known:
            found[metric.name] = known

    seats = [*fleet.parts, *fleet.actors.values()]
    put(PHASE, {phase: float(phase == driver.phase) for phase in PHASE.values})
    put(RUN_STEPS, {"": driver.steps})
    put(RUN_STEPS_GOAL, {"": config.online.steps})
    put(PARTS_WANTED, _by_part(seats))
    put(PARTS_UP, _by_part(seat for seat in seats if seat.works))
    put(PARTS_PARKED, _by_part(seat for seat in seats if seat.state == "parked"))
    slots = {str(slot): float(seat.works) for slot, seat in fleet.actors.items()}
    put(ACTOR_UP, dict(list(slots.items())[:MOST_SLOTS]))
    whole = [episode for episode in fleet.finished if episode.outcome != "aborted"]
    put(RECENT_RETURN, _recent([episode.total for episode in whole]))
    put(PLAN_RETURN, _plans(whole))
    put(ENTROPY_BOUND, {"": config.entropy.target})
    if driver.examiner.rows:
        last = driver.examiner.rows[-1]
        put(EVALUATED, {"mean": last["return"], "error": last["error"]})
        put(EVALUATED_SCORE, {"": last["score"]})
        put(EVALUATED_STEPS, {"": last["step"]})
    return found


def missing(driver: "Driver") -> str:
    """What a run lacks to be in order; "" if nothing."""
    away = [seat.name for seat in driver.fleet.parts if not seat.works]
    if driver.phase == "collecting" and not driver.fleet.running:
        away.append("every actor")
    return f"away: {', '.join(away)}" if away else ""


def _by_part(seats: "Iterable[SupervisedProcess]") -> dict[str, float]:
    names = [seat.name.partition("-")[0] for seat in seats]
    return {part: float(names.count(part)) for part in PARTS}


def _recent(returns: list[float]) -> dict[str, float]:
    if not returns:
        return {}
    return {"mean": float(np.mean(returns)), "best": max(returns), "worst": min(returns)}


def _plans(whole: "list[FinishedEpisode]") -> dict[str, float]:
    pairs = [(one.planned, one.realised) for one in whole if math.isfinite(one.planned)]
    if not pairs:
        return {}
    planned, realised = np.mean(pairs, axis=0)
    return {"planned": float(planned), "realised": float(realised)}
