"""What the processes of a whole online run do with their time, by their own counters."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from benchmarks.rollout_system import ENV, PATIENCE, grown
from benchmarks.tables import table
from m3pc.config.overrides import replace
from m3pc.distributed.driver import Driver
from m3pc.distributed.endpoints import RunEndpoints
from m3pc.model import checkpoint
from m3pc.online.run_control import request
from m3pc.online.run_folder import open_run, start
from m3pc.telemetry.catalogue import (
    ACTOR_BLOCKED,
    ACTOR_STEPPING,
    ENV_STEPS,
    LEARNER_WAIT,
    PLANNER_BUSY,
    PLANNER_IDLE,
    UPDATE_SECONDS,
    UPDATES_DONE,
)
from m3pc.telemetry.recorder import Metric, Snapshot, merged
from replay.store.store import Store

REST = "anything else"
ENDLESS = 10**6  # steps: the run is stopped long before
Part = Mapping[str, tuple[Metric, str]]  # what it does, and the seconds and label that say so
PARTS: Mapping[str, Part] = {
    "actor": {
        "stepping environments": (ACTOR_STEPPING, ""),
        **{f"waiting for {on}": (ACTOR_BLOCKED, on) for on in ACTOR_BLOCKED.values},
    },
    "planner": {"computing": (PLANNER_BUSY, ""), "without a request": (PLANNER_IDLE, "")},
    "learner": {
        "updating": (UPDATE_SECONDS, ""),
        **{f"waiting for {on}": (LEARNER_WAIT, on) for on in LEARNER_WAIT.values},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    seconds: float
    steps: float  # a second
    updates: float  # a second
    shares: dict[str, dict[str, float]]  # by part, then by what it did


def report_shares(path: Path, source: Path, data: Store, seconds: float) -> dict[str, Any]:
    """Of a new run at `path`."""
    given = checkpoint.read(source)
    settings = {"online.steps": ENDLESS, "evaluation.every": ENDLESS, "evaluation.episodes": 1}
    config = replace(given.weights.config, settings)
    start(given, data, ENV, config, path)
    found = Watched(path, seconds).measure()
    print(
        f"\n### Who waits for what\n\nA run with a learner, {config.fleet.actors} actors with "
        f"{config.fleet.envs_per_actor} environments each, mode {config.planner.mode}, for "
        f"{found.seconds:.0f} s: {found.steps:.0f} steps/s, {found.updates:.1f} updates/s.\n"
    )
    table(
        ["part", "what", "share of its time"],
        [
            [part, what, f"{share:.1%}"]
            for part, shares in found.shares.items()
            for what, share in shares.items()
        ],
    )
    return asdict(found)


class Watched:
    """Drives a run, and looks at its processes twice, `seconds` apart, once all of them work."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        run = open_run(path)
        place = RunEndpoints(run=path.resolve(), id=run.facts.id, coordinator="")
        self._driver = Driver(run, place, self._show)
        self._looks: list[tuple[float, dict[str, Snapshot]]] = []

    def measure(self) -> Measured:
        outcome = self._driver.drive()
        assert len(self._looks) == 2, f"the run ended too early: {outcome.reason}"
        (begin, before), (end, after) = self._looks
        seconds, fleet = end - begin, self._driver.run.config.fleet
        counts = {"actor": fleet.actors, "planner": fleet.planners, "learner": 1}
        by = {part: partial(grown, before[part], after[part]) for part in PARTS}
        shares = {
            part: {
                what: by[part](*seen) / seconds / counts[part] for what, seen in PARTS[part].items()
            }
            for part in PARTS
        }
        learner = shares["learner"]
        learner["updating"] -= learner["waiting for batch"]  # which is a part of it
        for found in shares.values():
            found[REST] = 1 - sum(found.values())
        return Measured(
            seconds=seconds,
            steps=by["actor"](ENV_STEPS) / seconds,
            updates=by["learner"](UPDATES_DONE) / seconds,
            shares=shares,
        )

    def _show(self, status: Mapping[str, Any]) -> None:
        """Called by the driver now and then."""
        working = status["updates"] and status["running"] == status["wanted"]
        if status["state"] != "collecting" or len(self._looks) == 2:
            return
        if not self._looks:
            self._looks += [self._look()] if working else []
        elif time.monotonic() - self._looks[0][0] >= self._seconds:
            self._looks.append(self._look())
            request(self._path, stop=True)

    def _look(self) -> tuple[float, dict[str, Snapshot]]:
        """Each process is asked now: what the driver heard last is of different times."""
        fleet = self._driver.fleet
        seats = {
            "actor": fleet.actors.values(),
            "planner": fleet.planners,
            "learner": [fleet.learner],
        }
        found = {}
        for part, mine in seats.items():
            reports = ray.get([seat.handle.report.remote() for seat in mine], timeout=PATIENCE)
            found[part] = merged(r[0] if part == "planner" else r.snapshot for r in reports)
        return time.monotonic(), found
