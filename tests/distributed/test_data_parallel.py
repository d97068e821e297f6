"""Several learners under Ray: the resources they hold, and that they end together."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import ray
import torch

from learner.remote import LearnerActor
from m3pc.distributed.endpoints import RunEndpoints
from m3pc.distributed.fleet import ProcessFleet
from m3pc.distributed.supervised_process import SupervisedProcess
from m3pc.online.learner_loop import LearnerStatus
from m3pc.telemetry.process_report import ProcessReport
from tests.support.runs.online_job import alive
from tests.support.runs.small_online import append_episodes, new_run
from tests.support.servers.waiting import eventually

SECONDS = 120.0  # for a process to start and answer


def gpus(count: int, case: tuple[str, int, float, float]) -> Any:
    is_missing = torch.cuda.device_count() < count
    reason = f"needs {count} GPUs that CUDA finds"
    return pytest.param(
        case, marks=pytest.mark.skipif(is_missing, reason=reason), id=f"cuda-{count}"
    )


# Device, learners, GPUs of a learner, of a planner. On a CPU GPUs are numbers that Ray counts.
CPU = pytest.param(("cpu", 2, 0.5, 0.25), id="cpu")
ONE_GPU, TWO_GPUS = gpus(1, ("cuda", 1, 0.5, 0.5)), gpus(2, ("cuda", 2, 1.0, 0.0))


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessFleet]:
    """With a running store whose episodes owe updates. Tests start the other processes."""
    device, learners, learner_gpus, planner_gpus = request.param
    run = new_run(
        tmp_path_factory.mktemp("learners") / "run",
        compute__device=device,
        fleet__learners=learners,
        fleet__learner_gpus=learner_gpus,
        fleet__planner_gpus=planner_gpus,
        online__checkpoint_every=5,
        online__updates_per_step=0.5,
    )
    append_episodes(run, 4)
    fleet = ProcessFleet(run, RunEndpoints(run=run.path, id=run.info.id, coordinator=""))
    started(fleet.store)
    yield fleet
    fleet.end()


def started(process: SupervisedProcess[Any]) -> Any:
    """Start it and wait for its first report; its handle."""

    def has_reported() -> bool:
        process.poll(time.monotonic())
        return process.report is not None

    assert eventually(has_reported, SECONDS), process.reason
    return process.handle


def call(handle: Any, function: Any) -> Any:
    """The result of a function that runs in the actor's process and gets the actor."""
    return ray.get(handle.__ray_call__.remote(function), timeout=SECONDS)


def pid(actor: Any) -> int:
    return os.getpid()


def resources(actor: Any) -> dict[str, float]:
    assigned: dict[str, float] = cast(Any, ray.get_runtime_context()).get_assigned_resources()
    return assigned


def follower_pids(actor: Any) -> list[int]:
    return [call(follower, pid) for follower in actor.learner.followers]


def follower_resources(actor: Any) -> list[dict[str, float]]:
    return [call(follower, resources) for follower in getattr(actor.learner, "followers", ())]


def status(fleet: ProcessFleet) -> LearnerStatus:
    fleet.learner.poll(time.monotonic())
    assert fleet.learner_status is not None, fleet.learner.reason
    return fleet.learner_status


def caught_up(fleet: ProcessFleet) -> LearnerStatus:
    """When it has done all updates that are owed and waits for more episodes."""
    started(fleet.learner)
    assert eventually(lambda: status(fleet).waiting or status(fleet).error, SECONDS)
    assert status(fleet).error == ""
    return status(fleet)


@pytest.mark.ray
@pytest.mark.parametrize("fleet", [CPU, ONE_GPU], indirect=True)
def test_learners_and_planners_hold_gpus_and_actors_none(fleet: ProcessFleet) -> None:
    config = fleet.run.config.fleet
    learner, planner = started(fleet.learner), started(fleet.planners[0])
    expected = {"CPU": 1.0, "GPU": config.learner_gpus}
    assert call(learner, resources) == expected
    assert call(learner, follower_resources) == [expected] * (config.learners - 1)
    assert call(planner, resources) == {"CPU": 1.0, "GPU": config.planner_gpus}
    fleet.scale(1, time.monotonic())
    (actor,) = fleet.actors.values()
    actor.poll(time.monotonic())
    assert call(actor.handle, resources) == {"CPU": 1.0}
    fleet.scale(0, time.monotonic())


@pytest.mark.ray
@pytest.mark.parametrize("fleet", [CPU, TWO_GPUS], indirect=True)
def test_a_follower_that_is_killed_ends_its_lead_and_both_come_back_at_their_checkpoint(
    fleet: ProcessFleet,
) -> None:
    before = caught_up(fleet)
    assert before.updates >= 20
    (follower,) = call(fleet.learner.handle, follower_pids)
    os.kill(follower, signal.SIGKILL)
    assert eventually(lambda: status(fleet).error, SECONDS)
    error = status(fleet).error
    assert error.startswith("PeersLostError: learner 0 of 2 lost the others")
    assert "learner 1: ActorDiedError" in error
    fleet.learner.lost(time.monotonic(), error)
    again = caught_up(fleet)
    assert again.epoch > before.epoch
    assert again.updates >= before.updates
    (successor,) = call(fleet.learner.handle, follower_pids)
    assert successor != follower and alive(successor)


@pytest.mark.ray
@pytest.mark.parametrize("fleet", [CPU, TWO_GPUS], indirect=True)
def test_followers_end_with_their_lead(fleet: ProcessFleet) -> None:
    caught_up(fleet)
    learner = fleet.learner.handle
    (follower,) = call(learner, follower_pids)
    assert alive(follower)
    os.kill(call(learner, pid), signal.SIGKILL)
    assert eventually(lambda: not alive(follower))


class Unsaved:
    """A learner that cannot save."""

    def work(self, stop: threading.Event) -> None:
        stop.wait(SECONDS)
        raise OSError("no space left")

    def report(self, error: str = "") -> ProcessReport[str]:
        return ProcessReport(pid=os.getpid(), snapshot={}, detail=error)


@pytest.mark.ray
def test_a_learner_that_could_not_save_does_not_say_that_it_did(ray_cluster: None) -> None:
    learner: Any = cast(Any, LearnerActor).options(num_cpus=0).remote(Unsaved)
    try:
        assert ray.get(learner.stop.remote(SECONDS), timeout=SECONDS) is False
        report = ray.get(learner.report.remote(), timeout=SECONDS)
        assert report.detail == "OSError: no space left"
    finally:
        ray.kill(learner)
