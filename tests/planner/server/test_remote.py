"""The planner server in its own process, and the client that asks it."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from m3pc.telemetry import catalogue, recorder
from m3pc.types import Decision, InputError, PlannerGoneError, PlanRequest, Window
from planner.policy import Policy
from planner.server.client import PlannerClient
from planner.server.remote import PlannerActor
from planner.server.service import PlannerService
from tests.support.models.published import versioned
from tests.support.models.small_weights import windows

NAME, NAMESPACE, SECONDS = "planner-under-test", "tests", 60.0


@pytest.fixture
def actor(ray_cluster: None) -> Iterator[Any]:
    build = partial(PlannerService, versioned(1))
    found = cast(Any, PlannerActor).options(name=NAME, namespace=NAMESPACE).remote(build)
    assert ray.get(found.ready.remote(), timeout=SECONDS)
    yield found
    ray.kill(found)


def client(*names: str) -> PlannerClient:
    return PlannerClient(names or [NAME], NAMESPACE, deadline=10.0)


@pytest.mark.ray
def test_requests_on_their_way_together_are_each_answered(actor: Any) -> None:
    asks = [
        PlanRequest(window=windows([4, n % 5], seed=n), mode=mode, explore=True)
        for n in range(12)
        for mode in ("rcbc", "m")
    ]
    expected = Policy(versioned(1)).answer(asks)
    asking = client()
    pending = [asking.ask(ask) for ask in asks]
    for each, wanted in zip(pending, expected, strict=True):
        found = each.result(SECONDS)
        np.testing.assert_allclose(found.actions, wanted.actions, rtol=1e-3, atol=1e-4)
        assert found.version == wanted.version
        found.actions[:] = 0  # it belongs to whoever asked
    snapshot, version, _, stuck = ray.get(actor.report.remote(), timeout=SECONDS)
    assert recorder.value(snapshot, catalogue.REQUESTS, "ok") == len(asks)
    assert (version, stuck) == (expected[0].version, 0.0)
    assert [each.retries for each in pending] == [0] * len(asks)


@pytest.mark.ray
def test_who_asks_a_planner_loads_no_torch(actor: Any) -> None:
    @ray.remote(num_cpus=0)
    def ask(asking: PlannerClient, window: Window) -> tuple[int, bool]:
        import sys

        return len(asking.decide(window).actions), "torch" in sys.modules

    assert ray.get(ask.remote(client(), windows([4, 2])), timeout=SECONDS) == (2, False)


@pytest.mark.ray
def test_a_bad_request_is_told_to_whoever_asked(actor: Any) -> None:
    bad = windows([4])
    bad.states[0, 0] = np.nan
    asking = client()
    with pytest.raises(InputError, match="finite"):
        asking.ask(PlanRequest(window=bad)).result(SECONDS)
    assert len(asking.decide(windows([4])).actions) == 1


@pytest.mark.ray
def test_a_planner_that_does_not_exist_is_passed_over_for_one_that_does(actor: Any) -> None:
    asked = client("nobody", NAME).ask(PlanRequest(window=windows([4, 2])))
    assert len(asked.result(SECONDS).actions) == 2
    assert asked.retries == 1
    with pytest.raises(PlannerGoneError, match="nobody"):
        client("nobody").ask(PlanRequest(window=windows([4]))).result(0.2)


def hanging() -> PlannerService:
    """Sound at its start; then no batch of this process ever ends."""

    def answer(policy: Policy, asks: Sequence[PlanRequest]) -> list[Decision]:
        time.sleep(600)
        return []

    found = PlannerService(versioned(1))
    setattr(Policy, "answer", answer)  # noqa: B010
    return found


@pytest.mark.ray
def test_a_planner_whose_batch_hangs_ends_and_another_is_asked(actor: Any) -> None:
    stuck = cast(Any, PlannerActor).options(name="stuck", namespace=NAMESPACE).remote(hanging, 1.0)
    assert ray.get(stuck.ready.remote(), timeout=SECONDS)
    asked = client("stuck", NAME).ask(PlanRequest(window=windows([4, 2])))
    assert len(asked.result(SECONDS).actions) == 2
    assert asked.retries == 1
    with pytest.raises(RayActorError):
        ray.get(stuck.ready.remote(), timeout=SECONDS)
