"""The rollout side of a run in its real processes: actors, planners and a store, no learner.

The hopper does not end an episode when it falls: as under a policy that has learnt to stand, nearly
all steps are in the middle of an episode, whatever the weights.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import ray

from actors.remote import RolloutActor
from actors.reports import RolloutStatus
from actors.rollout_loop import ExplorationConfig
from actors.rollout_worker import RolloutConfig
from benchmarks.live_system import cpu_seconds
from m3pc.config.overrides import replace
from m3pc.config.schema import Config, Mode
from m3pc.distributed.endpoints import NAMESPACE, RunEndpoints
from m3pc.model import checkpoint
from m3pc.online.recovery import REPLAY
from m3pc.telemetry.catalogue import (
    ACTOR_BLOCKED,
    ACTOR_STEPPING,
    BATCH_ROWS,
    ENV_STEPS,
    PLANNER_BUSY,
)
from m3pc.telemetry.process_report import ProcessReport
from m3pc.telemetry.recorder import Metric, Snapshot, merge, value
from m3pc.types import PlannerEndpoint
from planner.server.client import PlannerClient
from planner.server.remote import PlannerActor
from planner.server.service import PlannerService
from replay.format.manifest import Header
from replay.format.payload import encode
from replay.server.client import StoreClient
from replay.server.remote import StoreActor

ENV = "d4rl/Hopper-v2"
ENV_KWARGS = {"terminate_when_unhealthy": False}
STATES, ACTIONS, HORIZON = 11, 3, 1000
NO_LIMIT = 10**9  # steps that collecting may run ahead of learning
PATIENCE = 60.0  # seconds; a call that takes longer hangs


class Shape(NamedTuple):
    actors: int
    envs: int  # of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Which planner an actor asks, by the slot of the actor."""

    planners: tuple[str, ...]  # servers whose work is counted
    planner_of: Callable[[int], PlannerEndpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Rates over some seconds. Shares are of one process's time."""

    steps: float  # a second, of all environments
    steps_by_cpu: float  # a second of processor time of all actors and planners together
    decisions: float  # a second, by the planners' own count; those of actors have none
    batch: float  # environments answered together, mean
    stepping: float
    blocked: float  # waiting for a planner
    busy: float  # of a planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """All that actors and planners have counted so far."""

    at: float
    cpu: float  # seconds
    snapshot: Snapshot


class System:
    """Its processes live in the Ray session of the caller."""

    def __init__(self, folder: Path, source: Path) -> None:
        self._place = RunEndpoints(run=folder, id="bench", coordinator="")
        self._source, self._config = source, checkpoint.read(source).weights.config
        config = replace(self._config, {"online.slack": NO_LIMIT, "fleet.durability": "os"})
        header = Header(
            states=STATES,
            actions=ACTIONS,
            max_episode_steps=HORIZON,
            env=ENV,
            source={"kind": "bench"},
        )
        store = cast(Any, StoreActor).options(name=self._place.name("store"), namespace=NAMESPACE)
        self._store = store.remote(str(folder / REPLAY), header, config.online, config.fleet)
        ray.get(self._store.status.remote(), timeout=PATIENCE)  # recovered
        self._planners: dict[str, Any] = {}
        self._actors: dict[tuple[str, int], Any] = {}

    def serve(
        self, name: str, settings: Mapping[str, Any] | None = None, source: Path | None = None
    ) -> str:
        """Start a planner server, with settings and weights of its own, unless it runs already."""
        if name in self._planners:
            return name
        path = source or self._source
        config = checkpoint.read(path).weights.config
        build = partial(build_planner, path, replace(config, dict(settings or {})))
        options: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "num_cpus": 0}
        self._planners[name] = cast(Any, PlannerActor).options(**options).remote(build)
        assert ray.get(self._planners[name].ready.remote(), timeout=PATIENCE)
        return name

    def client(self, names: Sequence[str], slot: int) -> PlannerClient:
        return PlannerClient(
            names,
            NAMESPACE,
            window=self._config.model.window,
            horizon=self._config.planner.horizon,
            deadline=self._config.fleet.deadline,
            slot=slot,
        )

    def planner_cpu(self, name: str) -> float:
        """Seconds of processor time that a planner server has used."""
        return cpu_seconds(ray.get(self._planners[name].report.remote(), timeout=PATIENCE).pid)

    def close(self) -> None:
        for handle in (*self._actors.values(), *self._planners.values(), self._store):
            ray.kill(handle)

    def turn(self, way: Way, mode: Mode, shape: Shape, *, warm: float, seconds: float) -> Turn:
        """Collect, and measure after `warm` seconds."""
        kind = "served" if way.planners else "inside"  # those that load torch are not used again
        slots = range(shape.actors)
        handles = [self._actor(kind, slot) for slot in slots]
        configs = [self._rollout_config(way.planner_of(slot), mode, shape.envs) for slot in slots]
        _all(handle.start.remote(config) for handle, config in zip(handles, configs, strict=True))
        try:
            self._wait_until_all_step(handles)
            time.sleep(warm)
            before = self._counts(handles, way.planners)
            time.sleep(seconds)
            after = self._counts(handles, way.planners)
        finally:
            _all(handle.drain.remote(PATIENCE) for handle in handles)
        return _turn(before, after, shape.actors, len(way.planners))

    def _actor(self, kind: str, slot: int) -> Any:
        if (kind, slot) not in self._actors:
            self._actors[kind, slot] = cast(Any, RolloutActor).options(num_cpus=0).remote(slot)
        return self._actors[kind, slot]

    def _rollout_config(self, planner: PlannerEndpoint, mode: Mode, envs: int) -> RolloutConfig:
        fleet = self._config.fleet
        return RolloutConfig(
            env_id=ENV,
            env_kwargs=ENV_KWARGS,
            seed=0,
            exploration=ExplorationConfig(mode=mode),
            planner=planner,
            sink=StoreClient(self._place.name("store"), NAMESPACE, fleet.deadline),
            encode=encode,
            connect=self._place.connect,
            envs=envs,
        )

    def _wait_until_all_step(self, handles: Sequence[Any]) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            reports: list[ProcessReport[RolloutStatus]] = _all(
                handle.report.remote() for handle in handles
            )
            statuses = [report.detail for report in reports]
            failed = [status.reason for status in statuses if status.state == "failed"]
            assert not failed, failed
            if all(value(report.snapshot, ENV_STEPS) for report in reports):
                return
            assert time.monotonic() < end, "an actor does not begin to step"
            time.sleep(0.05)

    def _counts(self, actors: Sequence[Any], planners: Sequence[str]) -> Counts:
        handles = [*actors, *(self._planners[name] for name in planners)]
        reports: list[ProcessReport[Any]] = _all(handle.report.remote() for handle in handles)
        return Counts(
            at=time.monotonic(),
            cpu=sum(cpu_seconds(report.pid) for report in reports),
            snapshot=merge(report.snapshot for report in reports),
        )


def build_planner(source: Path, config: Config) -> PlannerService:
    return PlannerService(checkpoint.read(source).weights, config)


def grown(before: Snapshot, after: Snapshot, metric: Metric, label: str = "") -> float:
    """By how much a counter, or the sum of what a histogram observed, has grown."""

    def total(snapshot: Snapshot) -> float:
        return snapshot.get(metric.name, {}).get(label, [0.0])[-1]

    return total(after) - total(before)


def _turn(before: Counts, after: Counts, actors: int, planners: int) -> Turn:
    by, seconds = partial(grown, before.snapshot, after.snapshot), after.at - before.at
    batches = _count(after.snapshot) - _count(before.snapshot)
    return Turn(
        steps=by(ENV_STEPS) / seconds,
        steps_by_cpu=by(ENV_STEPS) / (after.cpu - before.cpu),
        decisions=(by(BATCH_ROWS) if planners else by(ENV_STEPS)) / seconds,
        batch=by(BATCH_ROWS) / batches if batches else 1.0,
        stepping=by(ACTOR_STEPPING) / seconds / actors,
        blocked=by(ACTOR_BLOCKED, "planner") / seconds / actors,
        busy=by(PLANNER_BUSY) / seconds / max(planners, 1),
    )


def _count(snapshot: Snapshot) -> float:
    return sum(snapshot.get(BATCH_ROWS.name, {}).get("", [0.0])[:-1])


def _all(calls: Any) -> Any:
    return ray.get(list(calls), timeout=2 * PATIENCE)
