"""How the processes of an online run spend their time, by their own counters."""

import time
from collections.abc import Iterable, Mapping
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
from m3pc.distributed.supervised_process import SupervisedProcess
from m3pc.model import checkpoint
from m3pc.online.run_control import request
from m3pc.online.run_folder import create_run, open_run
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
from m3pc.telemetry.recorder import Metric, Snapshot, merge
from replay.store.store import Store

REST = "anything else"
ENDLESS = 10**6  # steps: the run is stopped long before
Part = Mapping[str, tuple[Metric, str]]  # activity: its counter of seconds and the label
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
class TimeShares:
    seconds: float
    steps: float  # per second
    updates: float  # per second
    shares: dict[str, dict[str, float]]  # by kind of process, then by activity


def report_shares(path: Path, source: Path, data: Store, seconds: float) -> dict[str, Any]:
    """Measure and print the time shares of a new run at `path`, started from `source`."""
    initial = checkpoint.read(source)
    settings = {"online.steps": ENDLESS, "evaluation.every": ENDLESS, "evaluation.episodes": 1}
    config = replace(initial.weights.config, settings)
    create_run(initial, data, ENV, config, path)
    measured = MeasuredRun(path, seconds).measure()
    print(
        f"\n### Who waits for what\n\nA run with a learner, {config.fleet.actors} actors with "
        f"{config.fleet.envs_per_actor} environments each, mode {config.planner.mode}, for "
        f"{measured.seconds:.0f} s: {measured.steps:.0f} steps/s, {measured.updates:.1f} "
        "updates/s.\n"
    )
    table(
        ["part", "what", "share of its time"],
        [
            [part, what, f"{share:.1%}"]
            for part, shares in measured.shares.items()
            for what, share in shares.items()
        ],
    )
    return asdict(measured)


class MeasuredRun:
    """Drives a run and reads the counters of its processes twice, `seconds` apart."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        run = open_run(path)
        place = RunEndpoints(run=path.resolve(), id=run.info.id, coordinator="")
        self._driver = Driver(run, place, self._show)
        self._readings: list[tuple[float, dict[str, Snapshot]]] = []

    def measure(self) -> TimeShares:
        outcome = self._driver.drive()
        assert len(self._readings) == 2, f"the run ended too early: {outcome.reason}"
        (begin, before), (end, after) = self._readings
        seconds, fleet = end - begin, self._driver.run.config.fleet
        counts = {"actor": fleet.actors, "planner": fleet.planners, "learner": 1}
        by = {part: partial(grown, before[part], after[part]) for part in PARTS}
        shares = {
            part: {
                what: by[part](*counter) / seconds / counts[part]
                for what, counter in PARTS[part].items()
            }
            for part in PARTS
        }
        learner = shares["learner"]
        learner["updating"] -= learner["waiting for batch"]  # which is a part of it
        for activities in shares.values():
            activities[REST] = 1 - sum(activities.values())
        return TimeShares(
            seconds=seconds,
            steps=by["actor"](ENV_STEPS) / seconds,
            updates=by["learner"](UPDATES_DONE) / seconds,
            shares=shares,
        )

    def _show(self, status: Mapping[str, Any]) -> None:
        """Called by the driver with each status; the first reading waits until all work."""
        working = status["updates"] and status["running"] == status["wanted"]
        if status["state"] != "collecting" or len(self._readings) == 2:
            return
        if not self._readings:
            self._readings += [self._read_counters()] if working else []
        elif time.monotonic() - self._readings[0][0] >= self._seconds:
            self._readings.append(self._read_counters())
            request(self._path, stop=True)

    def _read_counters(self) -> tuple[float, dict[str, Snapshot]]:
        """Ask every process now, since the driver's last reports are of different times."""
        fleet = self._driver.fleet
        processes: dict[str, Iterable[SupervisedProcess[Any]]] = {
            "actor": fleet.actors.values(),
            "planner": fleet.planners,
            "learner": [fleet.learner],
        }
        snapshots = {}
        for part, members in processes.items():
            calls = [process.handle.report.remote() for process in members]
            reports = ray.get(calls, timeout=PATIENCE)
            snapshots[part] = merge(report.snapshot for report in reports)
        return time.monotonic(), snapshots
