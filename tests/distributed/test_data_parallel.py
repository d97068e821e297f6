"""Learners under Ray: what they hold, and that they live and die together."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray
import torch

from learner.remote import LearnerActor
from m3pc.distributed.endpoints import RunEndpoints
from m3pc.distributed.fleet import ProcessFleet
from m3pc.distributed.supervisor import SupervisedProcess
from m3pc.online.learner_loop import LearnerReport
from tests.support.runs.small_online import appended, new_run
from tests.support.servers.waiting import eventually

SECONDS = 120.0  # for a process to start and answer


def gpus(count: int, case: tuple[str, int, float, float]) -> Any:
    lacking = torch.cuda.device_count() < count
    reason = f"needs {count} GPUs that CUDA finds"
    return pytest.param(case, marks=pytest.mark.skipif(lacking, reason=reason), id=f"cuda-{count}")


# Device, learners, GPUs of a learner, of a planner. On a CPU GPUs are numbers that Ray counts.
CPU = pytest.param(("cpu", 2, 0.5, 0.25), id="cpu")
ONE_GPU, TWO_GPUS = gpus(1, ("cuda", 1, 0.5, 0.5)), gpus(2, ("cuda", 2, 1.0, 0.0))


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessFleet]:
    """With a store that owes updates; the rest is to be started."""
    device, learners, of_learner, of_planner = request.param
    run = new_run(
        tmp_path_factory.mktemp("learners") / "run",
        compute__device=device,
        fleet__learners=learners,
        fleet__learner_gpus=of_learner,
        fleet__planner_gpus=of_planner,
        online__checkpoint_every=5,
        online__updates_per_step=0.5,
    )
    appended(run, 4)
    found = ProcessFleet(run, RunEndpoints(run=run.path, id=run.facts.id, coordinator=""))
    up(found.store)
    yield found
    found.end()


def up(seat: SupervisedProcess) -> Any:
    """Start it, wait for its first report; its handle."""

    def reported() -> bool:
        seat.poll(time.monotonic())
        return seat.report is not None

    assert eventually(reported, SECONDS), seat.reason
    return seat.handle


def asked(handle: Any, question: Any) -> Any:
    return ray.get(handle.__ray_call__.remote(question), timeout=SECONDS)


def resources(actor: Any) -> dict[str, float]:
    found: dict[str, float] = cast(Any, ray.get_runtime_context()).get_assigned_resources()
    return found


def mates(actor: Any) -> list[int]:
    """Processes of the further learners."""
    return [ray.get(mate.pid.remote(), timeout=SECONDS) for mate in actor._work.mates]


def mates_resources(actor: Any) -> list[dict[str, float]]:
    return [asked(mate, resources) for mate in getattr(actor._work, "mates", ())]


def lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def report(fleet: ProcessFleet) -> LearnerReport:
    fleet.learner.poll(time.monotonic())
    assert fleet.learnt is not None, fleet.learner.reason
    return fleet.learnt


def caught_up(fleet: ProcessFleet) -> LearnerReport:
    """Once it has done some updates and waits for more to learn from."""
    up(fleet.learner)
    assert eventually(lambda: report(fleet).waiting or report(fleet).error, SECONDS)
    assert report(fleet).error == ""
    return report(fleet)


@pytest.mark.ray
@pytest.mark.parametrize("fleet", [CPU, ONE_GPU], indirect=True)
def test_learners_and_planners_hold_gpus_and_actors_none(fleet: ProcessFleet) -> None:
    wanted = fleet.run.config.fleet
    learner, planner = up(fleet.learner), up(fleet.planners[0])
    held = {"CPU": 1.0, "GPU": wanted.learner_gpus}
    assert asked(learner, resources) == held
    assert asked(learner, mates_resources) == [held] * (wanted.learners - 1)
    assert asked(planner, resources) == {"CPU": 1.0, "GPU": wanted.planner_gpus}
    fleet.scale(1, time.monotonic())
    (actor,) = fleet.actors.values()
    actor.poll(time.monotonic())
    assert asked(actor.handle, resources) == {"CPU": 1.0}
    fleet.scale(0, time.monotonic())


@pytest.mark.ray
@pytest.mark.parametrize("fleet", [CPU, TWO_GPUS], indirect=True)
def test_a_mate_that_is_killed_ends_the_learner_and_both_come_back_at_their_checkpoint(
    fleet: ProcessFleet,
) -> None:
    before = caught_up(fleet)
    assert before.updates >= 20
    (mate,) = asked(fleet.learner.handle, mates)
    os.kill(mate, signal.SIGKILL)
    assert eventually(lambda: report(fleet).error, SECONDS)
    error = report(fleet).error
    assert error.startswith("MatesLostError: learner 0 of 2 lost the others")
    assert "learner 1: ActorDiedError" in error
    fleet.learner.lost(time.monotonic(), error)
    again = caught_up(fleet)
    assert again.epoch > before.epoch
    assert again.updates >= before.updates
    (other,) = asked(fleet.learner.handle, mates)
    assert other != mate and lives(other)


@pytest.mark.ray
@pytest.mark.parametrize("fleet", [CPU, TWO_GPUS], indirect=True)
def test_mates_end_with_the_learner_that_made_them(fleet: ProcessFleet) -> None:
    caught_up(fleet)
    learner = fleet.learner.handle
    (mate,) = asked(learner, mates)
    assert lives(mate)
    os.kill(ray.get(learner.pid.remote(), timeout=SECONDS), signal.SIGKILL)
    assert eventually(lambda: not lives(mate))


class Unsaved:
    """Cannot save what it learned."""

    def work(self, stop: threading.Event) -> None:
        stop.wait(SECONDS)
        raise OSError("no space left")

    def report(self, error: str = "") -> str:
        return error


@pytest.mark.ray
def test_a_learner_that_could_not_save_does_not_say_that_it_did(ray_cluster: None) -> None:
    learner: Any = cast(Any, LearnerActor).options(num_cpus=0).remote(Unsaved)
    try:
        assert ray.get(learner.stop.remote(SECONDS), timeout=SECONDS) is False
        assert ray.get(learner.report.remote(), timeout=SECONDS) == "OSError: no space left"
    finally:
        ray.kill(learner)
