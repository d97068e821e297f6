"""The planner server in its own process, and the client that asks it."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from m3pc.telemetry import catalogue, recorder
from m3pc.types import (
    Decision,
    InputError,
    PlannerGoneError,
    PlanRequest,
    Rejection,
    RejectReason,
    Window,
)
from planner.policy import Policy
from planner.server.client import PlannerClient
from planner.server.remote import PlannerActor
from planner.server.service import PlannerService
from planner.server.wire import request_to_bytes
from tests.support.models.published import versioned
from tests.support.models.small_weights import windows

NAME, NAMESPACE, SECONDS = "planner-under-test", "tests", 60.0


class HangingEngine:
    """Checks requests like its policy, but its batches never end."""

    def __init__(self, policy: Policy) -> None:
        self.check = policy.check

    def compute(self, requests: Sequence[PlanRequest]) -> list[Decision]:
        time.sleep(600)
        return []


StartActor = Callable[..., Any]


@pytest.fixture
def start(ray_cluster: None) -> Iterator[StartActor]:
    """Starts an actor under a name; all of them are killed at the end."""
    actors = []

    def start(name: str, *arguments: Any, **options: Any) -> Any:
        build = partial(PlannerService, versioned(1), **options)
        named = cast(Any, PlannerActor).options(name=name, namespace=NAMESPACE)
        actors.append(named.remote(build, *arguments))
        assert ray.get(actors[-1].ready.remote(), timeout=SECONDS)
        return actors[-1]

    yield start
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def actor(start: StartActor) -> Any:
    return start(NAME)


def client(*names: str) -> PlannerClient:
    return PlannerClient(names or [NAME], NAMESPACE, window=8, horizon=4, deadline=10.0)


@pytest.mark.ray
def test_requests_in_flight_together_are_each_answered(actor: Any) -> None:
    requests = [
        PlanRequest(window=windows([4, n % 5], seed=n), mode=mode, explore=True)
        for n in range(12)
        for mode in ("rcbc", "m")
    ]
    expected = Policy(versioned(1)).answer(requests)
    planner = client()
    pending = [planner.ask(request) for request in requests]
    for reply, one in zip(pending, expected, strict=True):
        decision = reply.result(SECONDS)
        np.testing.assert_allclose(decision.actions, one.actions, rtol=1e-3, atol=1e-4)
        assert decision.version == one.version
        decision.actions[:] = 0  # the caller may write to it
    report = ray.get(actor.report.remote(), timeout=SECONDS)
    assert recorder.value(report.snapshot, catalogue.REQUESTS, "ok") == len(requests)
    assert (report.detail.version, report.detail.batch_seconds) == (expected[0].version, 0.0)
    assert [reply.retries for reply in pending] == [0] * len(requests)


@pytest.mark.ray
def test_a_client_process_does_not_load_torch(actor: Any) -> None:
    # Variables of its own give the task a process that no other test has used.
    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"M3PC_TEST": "new process"}})
    def decide(planner: PlannerClient, window: Window) -> tuple[int, bool]:
        import sys

        return len(planner.decide(window).actions), "torch" in sys.modules

    assert ray.get(decide.remote(client(), windows([4, 2])), timeout=SECONDS) == (2, False)


@pytest.mark.ray
def test_a_bad_request_is_an_input_error_of_its_caller(actor: Any) -> None:
    bad = windows([4])
    bad.states[0, 0] = np.nan
    planner = client()
    with pytest.raises(InputError, match="finite"):
        planner.ask(PlanRequest(window=bad)).result(SECONDS)
    assert len(planner.decide(windows([4])).actions) == 1


@pytest.mark.ray
def test_a_planner_that_does_not_exist_is_passed_over_for_one_that_does(actor: Any) -> None:
    request = client("nobody", NAME).ask(PlanRequest(window=windows([4, 2])))
    assert len(request.result(SECONDS).actions) == 2
    assert request.retries == 1
    with pytest.raises(PlannerGoneError, match="nobody"):
        client("nobody").ask(PlanRequest(window=windows([4]))).result(0.2)


@pytest.mark.ray
def test_requests_that_wait_keep_their_deadlines_and_delay_no_report(start: StartActor) -> None:
    stuck = start("stuck", SECONDS, engine=HangingEngine)
    request = request_to_bytes(PlanRequest(window=windows([4])))
    replies = [stuck.plan.remote(request, 5.0) for _ in range(400)]
    begin = time.monotonic()
    while not ray.get(stuck.report.remote(), timeout=SECONDS).detail.batch_seconds:
        time.sleep(0.01)
    assert time.monotonic() - begin < 4.0, "while the requests still wait"
    for reply in ray.get(replies, timeout=SECONDS):
        assert isinstance(reply, Rejection)
        assert reply.why in (RejectReason.LATE, RejectReason.RETRY_LATER)


@pytest.mark.ray
def test_a_planner_whose_batch_hangs_ends_and_another_is_asked(
    actor: Any, start: StartActor
) -> None:
    stuck = start("stuck", 1.0, engine=HangingEngine)
    request = client("stuck", NAME).ask(PlanRequest(window=windows([4, 2])))
    assert len(request.result(SECONDS).actions) == 2
    assert request.retries == 1
    with pytest.raises(RayActorError):
        ray.get(stuck.ready.remote(), timeout=SECONDS)
