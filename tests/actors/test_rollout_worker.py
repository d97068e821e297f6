"""A rollout process from idle to ended: who it is, what it leaves in the store, why it ends."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.reports import RolloutStatus
from actors.rollout_loop import ExplorationConfig
from actors.rollout_worker import RolloutConfig, RolloutWorker
from m3pc.coordinator import connect
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, COORDINATOR_FAILURES, ENV_FAULTS, EPISODES
from m3pc.telemetry.process_report import ProcessReport
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
from tests.support.fakes.sinks import InMemorySink
from tests.support.fakes.slow_planner import SlowPlanner
from tests.support.faults.live_writer import open_writer
from tests.support.servers.waiting import PATIENCE, eventually


@pytest.fixture
def connect_run(tmp_path: Path) -> Callable[[], Coordinator]:
    path, generations = tmp_path / "coordinator.sqlite", tmp_path / "generations"
    return partial(connect, path, run="test", generations=generations)


@pytest.fixture
def worker() -> Iterator[RolloutWorker]:
    worker = RolloutWorker(5)
    yield worker
    worker.stop()
    assert eventually(lambda: worker.report().detail.state not in ("running", "draining"))


def rollout_config(connect_run: Callable[[], Coordinator], **changes: Any) -> RolloutConfig:
    arguments: dict[str, Any] = {
        "env_id": FAULTY,  # but without a fault
        "seed": 0,
        "exploration": ExplorationConfig(),
        "planner": SlowPlanner(),
        "sink": InMemorySink(),
        "encode": encode,
        "connect": connect_run,
        "heartbeat": 0.02,
        "env_kwargs": {"max_episode_steps": 9},
    }
    return RolloutConfig(**{**arguments, **changes})


def ended(report: ProcessReport[RolloutStatus]) -> float:
    """Episodes."""
    return sum(value(report.snapshot, EPISODES, outcome) for outcome in EPISODES.values)


def publish(coordinator: Coordinator, number: int) -> None:
    version = Version(epoch=coordinator.new_epoch("weights"), number=number)
    coordinator.publish("weights", Pointer(version=version, sha256="0" * 64, size=1, path="w"))


def test_each_start_is_an_incarnation_with_episodes_of_its_own(
    connect_run: Callable[[], Coordinator], worker: RolloutWorker, tmp_path: Path
) -> None:
    receipts = tmp_path / "receipts.jsonl"
    assert worker.report().detail.state == "idle"
    reports = []
    with GroupCommitter(open_writer(tmp_path / "store")) as appender:
        config = rollout_config(connect_run, sink=appender, ack_log=receipts)
        for _ in range(2):
            worker.start(config)
            assert eventually(lambda: len(worker.report().detail.finished) >= 20)
            assert worker.report().detail.state == "running"
            assert worker.drain(PATIENCE) == 0
            reports.append(worker.report())
    assert [(report.detail.state, report.detail.reason) for report in reports] == [
        ("ended", "drained")
    ] * 2
    assert {(report.pid, report.detail.slot) for report in reports} == {(os.getpid(), 5)}
    first, second = (report.detail.incarnation for report in reports)
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


def test_starting_a_worker_that_runs_changes_nothing(
    connect_run: Callable[[], Coordinator], worker: RolloutWorker
) -> None:
    config = rollout_config(connect_run)
    worker.start(config)
    assert eventually(lambda: worker.report().detail.finished)
    worker.start(rollout_config(connect_run))
    incarnation = worker.report().detail.incarnation
    with closing(connect_run()) as coordinator:
        assert coordinator.register(5) == incarnation + 1


class SilentCoordinator:
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
    connect_run: Callable[[], Coordinator], worker: RolloutWorker
) -> None:
    coordinator = SilentCoordinator(connect_run(), silent=3)
    worker.start(rollout_config(lambda: coordinator))
    assert eventually(lambda: worker.report().detail.finished)
    assert value(worker.report().snapshot, COORDINATOR_FAILURES) == 3
    coordinator.silent = 10**9
    assert eventually(lambda: value(worker.report().snapshot, COORDINATOR_FAILURES) > 10)
    number = worker.report().detail.finished[-1].number
    assert eventually(lambda: worker.report(after=number + 50).detail.finished)
    assert worker.report().detail.state == "running"


def test_a_coordinator_that_fails_is_asked_again_and_may_still_end_the_worker(
    connect_run: Callable[[], Coordinator], worker: RolloutWorker
) -> None:
    coordinator = SilentCoordinator(connect_run(), silent=0)
    exploration = ExplorationConfig(max_policy_lag=100)
    worker.start(
        rollout_config(lambda: coordinator, exploration=exploration)
    )  # the planner has version 3
    assert eventually(lambda: worker.report().detail.finished)
    coordinator.error, coordinator.silent = FileNotFoundError, 10**9
    assert eventually(lambda: value(worker.report().snapshot, COORDINATOR_FAILURES) > 3)
    assert worker.report().detail.state == "running"
    coordinator.silent = 0
    with closing(connect_run()) as other:
        publish(other, 104)
        assert eventually(lambda: value(worker.report().snapshot, ACTOR_BLOCKED, "stale") > 0)
        other.register(5)
    assert eventually(lambda: worker.report().detail.state == "ended")
    assert worker.report().detail.reason == "fenced"


def test_a_worker_that_is_registered_goes_on_without_further_answers(
    connect_run: Callable[[], Coordinator], worker: RolloutWorker
) -> None:
    class Unread(SilentCoordinator):
        def read(self, name: str) -> Pointer | None:
            raise FileNotFoundError(name)

    worker.start(rollout_config(lambda: Unread(connect_run(), silent=0)))
    assert eventually(lambda: worker.report().detail.finished)


def test_a_coordinator_that_fails_before_registration_ends_the_worker(
    connect_run: Callable[[], Coordinator], worker: RolloutWorker
) -> None:
    worker.start(
        rollout_config(lambda: SilentCoordinator(connect_run(), silent=1, error=PermissionError))
    )
    assert eventually(lambda: worker.report().detail.state == "failed")
    assert "slot 5 cannot be registered: PermissionError" in worker.report().detail.reason


def test_a_worker_whose_slot_was_given_to_another_ends(
    connect_run: Callable[[], Coordinator], worker: RolloutWorker
) -> None:
    worker.start(rollout_config(connect_run))
    assert eventually(lambda: worker.report().detail.finished)
    with closing(connect_run()) as coordinator:
        coordinator.register(5)
    assert eventually(lambda: worker.report().detail.state == "ended")
    assert worker.report().detail.reason == "fenced"


def test_the_newest_published_version_decides_what_is_too_old(
    connect_run: Callable[[], Coordinator], worker: RolloutWorker
) -> None:
    with closing(connect_run()) as coordinator:
        publish(coordinator, 104)
    exploration = ExplorationConfig(max_policy_lag=100)
    worker.start(rollout_config(connect_run, exploration=exploration))  # the planner has version 3
    assert eventually(lambda: worker.report().snapshot.get("m3pc_actor_blocked_seconds_total"))
    assert not eventually(lambda: worker.report().detail.finished, patience=0.3)
    assert worker.drain(PATIENCE) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"env_kwargs": {"at": 0, "on_reset": True}}, "failed 11 times"),
        ({"env_id": "toy/None-v0"}, "'toy/None-v0' cannot be made"),
    ],
)
def test_a_worker_that_cannot_go_on_says_why(
    connect_run: Callable[[], Coordinator],
    worker: RolloutWorker,
    changes: dict[str, Any],
    reason: str,
) -> None:
    forget()
    worker.start(rollout_config(connect_run, **changes))
    assert eventually(lambda: worker.report().detail.state == "failed")
    assert reason in worker.report().detail.reason
    worker.start(rollout_config(connect_run))
    assert eventually(lambda: worker.report().detail.finished)


def test_faults_are_counted_and_survived(
    connect_run: Callable[[], Coordinator], worker: RolloutWorker, tmp_path: Path
) -> None:
    forget()
    options = {"chance": 0.05, "kind": "any"}
    with GroupCommitter(open_writer(tmp_path / "store")) as appender:
        worker.start(rollout_config(connect_run, env_kwargs=options, sink=appender))
        assert eventually(lambda: len(worker.report().detail.finished) >= 50)
        assert worker.drain(PATIENCE) == 0
    report = worker.report()
    assert sum(value(report.snapshot, ENV_FAULTS, why) for why in ("nan", "crash", "shape")) > 5
    assert len(list(Store(tmp_path / "store").episodes())) == ended(report)


def test_a_worker_can_be_drained_before_it_is_registered(worker: RolloutWorker) -> None:
    def never() -> Coordinator:
        return SilentCoordinator(None, silent=10**9)

    worker.start(rollout_config(never))
    assert eventually(lambda: value(worker.report().snapshot, COORDINATOR_FAILURES) > 1)
    assert worker.drain(PATIENCE) == 0
    assert worker.report().detail.state == "ended"
    assert worker.report().detail.incarnation == -1
