"""A rollout process from idle to ended: who it is, what it leaves in the store, why it ends."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.reports import RolloutReport
from actors.rollout_loop import ExplorationConfig
from actors.rollout_worker import RolloutConfig, RolloutWorker
from m3pc.coordinator import connect
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, COORDINATOR_DOWN, ENV_FAULTS, EPISODES
from m3pc.telemetry.recorder import value
from m3pc.types import (
    Coordinator,
    CoordinatorUnavailableError,
    Pointer,
    Version,
)
from replay.format.payload import encode
from replay.store.store import Store
from replay.store.verify import verify
from replay.writing.group_commit import GroupCommitter
from tests.support.envs.faulty_env import FAULTY, forget
from tests.support.fakes.sinks import Kept
from tests.support.fakes.slow_planner import SlowPlanner
from tests.support.faults.live_writer import open_writer
from tests.support.servers.waiting import PATIENCE, eventually


@pytest.fixture
def join(tmp_path: Path) -> Callable[[], Coordinator]:
    path, generations = tmp_path / "coordinator.sqlite", tmp_path / "generations"
    return partial(connect, path, run="test", generations=generations)


@pytest.fixture
def collector() -> Iterator[RolloutWorker]:
    found = RolloutWorker(5)
    yield found
    found.stop()
    assert eventually(lambda: found.report().state not in ("running", "draining"))


def order(join: Callable[[], Coordinator], **changes: Any) -> RolloutConfig:
    given: dict[str, Any] = {
        "env_id": FAULTY,  # but without a fault
        "seed": 0,
        "acting": ExplorationConfig(window=8, horizon=4),
        "planner": SlowPlanner(),
        "sink": Kept(),
        "encode": encode,
        "connect": join,
        "heartbeat": 0.02,
        "env_kwargs": {"max_episode_steps": 9},
    }
    return RolloutConfig(**{**given, **changes})


def ended(report: RolloutReport) -> float:
    """Episodes."""
    return sum(value(report.snapshot, EPISODES, outcome) for outcome in EPISODES.values)


def publish(coordinator: Coordinator, number: int) -> None:
    version = Version(epoch=coordinator.new_epoch("weights"), number=number)
    coordinator.publish("weights", Pointer(version=version, sha256="0" * 64, size=1, path="w"))


def test_each_start_is_an_incarnation_with_episodes_of_its_own(
    join: Callable[[], Coordinator], collector: RolloutWorker, tmp_path: Path
) -> None:
    receipts = tmp_path / "receipts.jsonl"
    assert collector.report().state == "idle"
    reports = []
    with GroupCommitter(open_writer(tmp_path / "store")) as appender:
        given = order(join, sink=appender, receipts=receipts)
        for _ in range(2):
            collector.start(given)
            assert eventually(lambda: len(collector.report().finished) >= 20)
            assert collector.report().state == "running"
            assert collector.drain(PATIENCE) == 0
            reports.append(collector.report())
    assert [(report.state, report.reason) for report in reports] == [("ended", "drained")] * 2
    assert {(report.pid, report.slot) for report in reports} == {(os.getpid(), 5)}
    first, second = (report.incarnation for report in reports)
    assert 0 <= first < second
    rows = [json.loads(line) for line in receipts.read_text().splitlines()]
    store = Store(tmp_path / "store")
    keys = [row for s in store.segments if s.keys is not None for row in s.keys.tolist()]
    assert [[row["slot"], row["incarnation"], row["sequence"]] for row in rows] == keys
    assert {(row["slot"], row["incarnation"]) for row in rows} == {(5, first), (5, second)}
    assert len(rows) == sum(ended(report) for report in reports)
    seeds = [episode.seed for episode in store.episodes()]
    assert len(set(seeds)) == len(seeds)
    assert verify(tmp_path / "store") == []


def test_starting_a_collector_that_runs_changes_nothing(
    join: Callable[[], Coordinator], collector: RolloutWorker
) -> None:
    given = order(join)
    collector.start(given)
    assert eventually(lambda: collector.report().finished)
    collector.start(order(join))
    incarnation = collector.report().incarnation
    with closing(join()) as coordinator:
        assert coordinator.register(5) == incarnation + 1


class Reluctant:
    """A coordinator that answers only from the n-th call on."""

    def __init__(
        self, coordinator: Coordinator | None, silent: int, error: type[Exception] | None = None
    ) -> None:
        self._coordinator, self.silent = coordinator, silent
        self.error = error or CoordinatorUnavailableError

    def __getattr__(self, name: str) -> Any:
        if self.silent:
            self.silent -= 1
            raise self.error("not now")
        return getattr(self._coordinator, name)

    def close(self) -> None:
        if self._coordinator:
            self._coordinator.close()


def test_a_coordinator_that_is_silent_is_waited_for_and_then_done_without(
    join: Callable[[], Coordinator], collector: RolloutWorker
) -> None:
    coordinator = Reluctant(join(), silent=3)
    collector.start(order(lambda: coordinator))
    assert eventually(lambda: collector.report().finished)
    assert value(collector.report().snapshot, COORDINATOR_DOWN) == 3
    coordinator.silent = 10**9
    assert eventually(lambda: value(collector.report().snapshot, COORDINATOR_DOWN) > 10)
    number = collector.report().finished[-1].number
    assert eventually(lambda: collector.report(after=number + 50).finished)
    assert collector.report().state == "running"


def test_a_coordinator_that_fails_is_asked_again_and_may_still_end_the_collector(
    join: Callable[[], Coordinator], collector: RolloutWorker
) -> None:
    coordinator = Reluctant(join(), silent=0)
    acting = ExplorationConfig(window=8, horizon=4, pause_after=100)
    collector.start(order(lambda: coordinator, acting=acting))  # the planner has version 3
    assert eventually(lambda: collector.report().finished)
    coordinator.error, coordinator.silent = FileNotFoundError, 10**9
    assert eventually(lambda: value(collector.report().snapshot, COORDINATOR_DOWN) > 3)
    assert collector.report().state == "running"
    coordinator.silent = 0
    with closing(join()) as other:
        publish(other, 104)
        assert eventually(lambda: value(collector.report().snapshot, ACTOR_BLOCKED, "stale") > 0)
        other.register(5)
    assert eventually(lambda: collector.report().state == "ended")
    assert collector.report().reason == "fenced"


def test_a_collector_that_is_registered_goes_on_though_nothing_else_was_answered(
    join: Callable[[], Coordinator], collector: RolloutWorker
) -> None:
    class Unread(Reluctant):
        def read(self, name: str) -> Pointer | None:
            raise FileNotFoundError(name)

    collector.start(order(lambda: Unread(join(), silent=0)))
    assert eventually(lambda: collector.report().finished)


def test_a_coordinator_that_fails_before_it_registers_anybody_ends_the_collector(
    join: Callable[[], Coordinator], collector: RolloutWorker
) -> None:
    collector.start(order(lambda: Reluctant(join(), silent=1, error=PermissionError)))
    assert eventually(lambda: collector.report().state == "failed")
    assert "slot 5 cannot be registered: PermissionError" in collector.report().reason


def test_a_collector_whose_slot_was_given_away_ends(
    join: Callable[[], Coordinator], collector: RolloutWorker
) -> None:
    collector.start(order(join))
    assert eventually(lambda: collector.report().finished)
    with closing(join()) as coordinator:
        coordinator.register(5)
    assert eventually(lambda: collector.report().state == "ended")
    assert collector.report().reason == "fenced"


def test_the_newest_published_version_decides_what_is_too_old(
    join: Callable[[], Coordinator], collector: RolloutWorker
) -> None:
    with closing(join()) as coordinator:
        publish(coordinator, 104)
    acting = ExplorationConfig(window=8, horizon=4, pause_after=100)
    collector.start(order(join, acting=acting))  # the planner has version 3
    assert eventually(lambda: collector.report().snapshot.get("m3pc_actor_blocked_seconds_total"))
    assert not eventually(lambda: collector.report().finished, patience=0.3)
    assert collector.drain(PATIENCE) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"env_kwargs": {"at": 0, "on_reset": True}}, "failed 11 times"),
        ({"env_id": "toy/None-v0"}, "'toy/None-v0' cannot be made"),
    ],
)
def test_a_collector_that_cannot_go_on_says_why(
    join: Callable[[], Coordinator], collector: RolloutWorker, changes: dict[str, Any], reason: str
) -> None:
    forget()
    collector.start(order(join, **changes))
    assert eventually(lambda: collector.report().state == "failed")
    assert reason in collector.report().reason
    collector.start(order(join))
    assert eventually(lambda: collector.report().finished)


def test_faults_are_counted_and_survived(
    join: Callable[[], Coordinator], collector: RolloutWorker, tmp_path: Path
) -> None:
    forget()
    options = {"chance": 0.05, "kind": "any"}
    with GroupCommitter(open_writer(tmp_path / "store")) as appender:
        collector.start(order(join, env_kwargs=options, sink=appender))
        assert eventually(lambda: len(collector.report().finished) >= 50)
        assert collector.drain(PATIENCE) == 0
    report = collector.report()
    assert sum(value(report.snapshot, ENV_FAULTS, why) for why in ("nan", "crash", "shape")) > 5
    assert len(list(Store(tmp_path / "store").episodes())) == ended(report)


def test_a_collector_can_be_drained_before_it_is_registered(collector: RolloutWorker) -> None:
    def never() -> Coordinator:
        return Reluctant(None, silent=10**9)

    collector.start(order(never))
    assert eventually(lambda: value(collector.report().snapshot, COORDINATOR_DOWN) > 1)
    assert collector.drain(PATIENCE) == 0
    assert collector.report().state == "ended"
    assert collector.report().incarnation == -1
