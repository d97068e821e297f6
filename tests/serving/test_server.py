"""Sessions of service over HTTP: acting, repeated requests, limits and deadlines."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from m3pc.evaluation.agent import Agent
from m3pc.serving.messages import ByReturn, Step
from m3pc.types import Decision, PlanRequest, Rejection, RejectReason
from planner.latency_model import UNPLANNED_MODES
from planner.policy import Policy
from planner.server.service import PlannerService
from planner.server.weights_loader import typical_window
from tests.support.servers.served import (
    ACTIONS,
    STATES,
    Clock,
    InProcessServer,
    config,
    in_process,
    problem,
    weights,
)
from tests.support.servers.waiting import PATIENCE, eventually


@pytest.fixture(scope="module")
def served() -> Iterator[InProcessServer]:
    with in_process(max_sessions=100) as server:
        yield server


# Acting


def test_an_opened_session_reports_sizes_and_limits(served: InProcessServer) -> None:
    opened = served.client.post("/v1/sessions", json={"name": "arm-1", "mode": "q"}).json()
    sizes = (opened["state_size"], opened["action_size"], opened["step_limit"])
    assert sizes == (STATES, ACTIONS, 40)
    assert (opened["mode"], opened["name"], opened["candidates"]) == ("q", "arm-1", 16)
    assert (opened["version"], opened["env"], opened["recorded"]) == ("0-7", "Pendulum-v1", False)


def test_actions_equal_those_of_an_agent_with_the_same_observations(
    served: InProcessServer,
) -> None:
    agent = Agent(Policy(weights()))
    agent.reset(seed=5)
    for step, answer in enumerate(served.walk(served.opened(seed=5), 7)):
        expected = agent.act([step, step + 0.5, -step])
        np.testing.assert_allclose(answer["action"], expected, atol=1e-4)
        assert answer["step"] == step and answer["version"] == "0-7"
        assert (answer["candidates"], answer["hurried"], answer["late"]) == (16, False, False)
        assert answer["utility"] is not None and answer["effective"] >= 1


@pytest.mark.parametrize("mode", ["rcbc", "m", "q", "q0"])
def test_a_session_has_a_mode_and_a_ratio_of_its_own(served: InProcessServer, mode: str) -> None:
    half, full = (served.act(served.opened(mode=mode, ratio=r), 0).json() for r in (0.5, 1.0))
    assert half["condition"] == pytest.approx(full["condition"] / 2)
    assert half["candidates"] == (0 if mode == "rcbc" else 16)
    assert (half["utility"] is None) == (mode == "rcbc")


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ({}, [30 / 40, (30 - 5) / 39, (30 - 5 - 8) / 38]),
        ({"returns__mode": "sum"}, [30, 30 - 5, 30 - 5 - 8]),
    ],
    ids=["average", "sum"],
)
def test_a_session_may_have_a_target_in_rewards(
    returns: dict[str, Any], expected: list[float]
) -> None:
    """Rewards so far count towards the target. An episode has 40 steps."""
    with in_process(settings=config(**returns)) as served:
        session = served.opened(target=30.0)
        answers = [served.act(session, k, r).json() for k, r in enumerate([None, 5.0, 8.0])]
        assert [answer["condition"] for answer in answers] == pytest.approx(expected)
        message = {"step": 3, "observation": [0, 0, 0]}
        response = served.client.post(f"/v1/sessions/{session}/act", json=message)
        assert "a target was given" in problem(response, 409)["detail"]


@pytest.mark.parametrize("mode", ["average", "sum"])
def test_the_best_return_as_a_target_equals_a_ratio_of_one(mode: str) -> None:
    """The envelope of these weights begins at 2: of 40 steps, or in all."""
    with in_process(settings=config(returns__mode=mode)) as served:
        best = served.client.get("/v1/weights").json()["best_return"]
        assert best == pytest.approx(2 * (40 if mode == "average" else 1))
        opened = served.client.post("/v1/sessions", json={"target": best}).json()
        assert opened["best_return"] == best
        sessions = (opened["session"], served.opened(ratio=1.0))
        by_target, by_ratio = (served.act(session, 0).json() for session in sessions)
        assert by_target["condition"] == pytest.approx(by_ratio["condition"])


def test_a_session_goes_to_a_goal_or_along_waypoints(served: InProcessServer) -> None:
    goal = [1.0, 2.0, 3.0]
    openings: list[dict[str, Any]] = [
        {"goal": goal},
        {"waypoints": [goal]},
        {"waypoints": [goal] * 41},
        {"goal": [-1.0, 0.0, 0.0]},
        {"goal": goal, "mode": "goal-mask"},
    ]
    answers = [served.act(served.opened(**opening), 0).json() for opening in openings]
    actions = [answer["action"] for answer in answers]
    assert actions[0] == actions[1] == actions[2], "the robot stays at the last waypoint"
    assert actions[3] != actions[0] and actions[4] != actions[0]
    assert answers[0]["condition"] is None and answers[0]["candidates"] == 0


def test_exploring_changes_the_action(served: InProcessServer) -> None:
    calm, bold = (served.act(served.opened(explore=explore), 0).json() for explore in (False, True))
    assert calm["action"] != bold["action"]


def test_a_repeated_step_gets_the_same_answer(served: InProcessServer) -> None:
    session = served.opened()
    first = served.walk(session, 3)[-1]
    assert served.act(session, 2, 1.0).json() == first
    assert served.client.get(f"/v1/sessions/{session}").json()["steps"] == 3
    assert served.act(session, 3, 2.0).status_code == 200


def test_a_skipped_step_is_refused_with_the_expected_one(served: InProcessServer) -> None:
    session = served.opened()
    served.walk(session, 2)
    refusal = problem(served.act(session, 5, 1.0), 409)
    assert refusal["expected_step"] == 2
    assert "step 5 was sent, expected 2, or 1 again" in refusal["detail"]


def test_a_reward_at_step_0_is_refused(served: InProcessServer) -> None:
    session = served.opened()
    refusal = problem(served.act(session, 0, 1.0), 409)
    assert "reward is given at step 0" in refusal["detail"] and refusal["expected_step"] == 0
    assert served.act(session, 0).status_code == 200


def test_integers_may_be_written_with_a_decimal_point(served: InProcessServer) -> None:
    session = served.opened(step_limit=9.0, seed=2.0)
    assert served.act(session, 0, deadline_ms=1000).status_code == 200
    message = {"step": 1.0, "observation": [0, 0, 0]}
    assert served.client.post(f"/v1/sessions/{session}/act", json=message).status_code == 200


def test_a_session_reports_its_status_and_can_be_dropped(served: InProcessServer) -> None:
    session = served.opened(name="one", step_limit=9)
    served.walk(session, 3)
    status = served.client.get(f"/v1/sessions/{session}").json()
    assert (status["steps"], status["total"], status["step_limit"]) == (3, 0 + 1, 9)
    assert served.client.delete(f"/v1/sessions/{session}").status_code == 204
    for response in (
        served.client.delete(f"/v1/sessions/{session}"),
        served.client.get(f"/v1/sessions/{session}"),
        served.act(session, 3, 2.0),
        served.end(session, 3, 2.0),
    ):
        assert "there is no such session" in problem(response, 404)["detail"]


def test_an_end_may_be_repeated_but_not_changed(served: InProcessServer) -> None:
    session = served.opened()
    served.walk(session, 2)
    first = served.end(session, 2, 1.0, terminated=True)
    assert first.json() == {
        "steps": 2, "total": 1.0, "stored": "no store", "slot": None, "reason": ""
    }  # fmt: skip
    assert served.end(session, 2, 1.0, terminated=True).json() == first.json()
    assert "ended by its robot" in problem(served.end(session, 2, 5.0), 409)["detail"]


def test_an_ended_session_is_remembered_but_does_not_continue(
    served: InProcessServer,
) -> None:
    session = served.opened()
    served.walk(session, 2)
    served.end(session, 2, 1.0, terminated=True)
    assert "ended by its robot" in problem(served.act(session, 2, 1.0), 409)["detail"]
    status = served.client.get(f"/v1/sessions/{session}").json()
    assert (status["ended"], status["steps"], status["total"]) == (True, 2, 1.0)
    assert served.client.delete(f"/v1/sessions/{session}").status_code == 204
    problem(served.client.get(f"/v1/sessions/{session}"), 404)


def test_a_robot_that_opens_again_replaces_its_own_session(served: InProcessServer) -> None:
    first, other = served.opened(name="arm"), served.opened(name="leg")
    again = served.opened(name="arm")
    assert "was replaced by another one" in problem(served.act(first, 0), 409)["detail"]
    assert served.act(again, 0).status_code == served.act(other, 0).status_code == 200


# Concurrent requests


class ControlledPlanner(PlannerService):
    """Holds requests while `held`, and answers some of them with rejections."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.go_on = threading.Event()
        self.go_on.set()
        self.rejections: deque[Rejection] = deque()
        self.hard_deadlines: list[float] = []  # of all requests

    def submit(
        self, request: PlanRequest, hard_deadline: float, **options: Any
    ) -> "Future[Decision | Rejection]":
        self.hard_deadlines.append(hard_deadline)
        reply: Future[Decision | Rejection] = Future()
        if self.rejections:
            reply.set_result(self.rejections.popleft())
            return reply

        def plan() -> None:
            assert self.go_on.wait(PATIENCE)
            own = super(ControlledPlanner, self).submit(request, hard_deadline, **options)
            reply.set_result(own.result(PATIENCE))

        threading.Thread(target=plan).start()
        return reply

    def hold(self) -> None:
        self.hard_deadlines.clear()
        self.go_on.clear()


@pytest.fixture
def controlled() -> Iterator[InProcessServer]:
    with in_process(planner_class=ControlledPlanner, max_sessions=9) as server:
        yield server


def planner_of(served: InProcessServer) -> ControlledPlanner:
    assert isinstance(served.planner, ControlledPlanner)
    return served.planner


FAILED = Rejection(why=RejectReason.FAILED, reason="no answer today", wait=0.0)


def test_a_request_repeated_while_it_is_planned_waits_for_the_same_plan(
    controlled: InProcessServer,
) -> None:
    planner, session = planner_of(controlled), controlled.opened()
    planner.hold()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(controlled.act, session, 0)
        assert eventually(lambda: planner.hard_deadlines)
        second = pool.submit(controlled.act, session, 0)
        assert problem(controlled.act(session, 1, 0.0), 409)["expected_step"] == 0
        planner.go_on.set()
        assert first.result(PATIENCE).json() == second.result(PATIENCE).json()
    assert len(planner.hard_deadlines) == 1


def test_a_session_that_waits_for_a_plan_is_not_idle() -> None:
    clock = Clock()
    with (
        in_process(planner_class=ControlledPlanner, clock=clock, idle_seconds=5.0) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        planner, session = planner_of(served), served.opened()
        planner.hold()
        answer = pool.submit(served.act, session, 0)
        assert eventually(lambda: planner.hard_deadlines)
        clock.now += 6
        served.run(served.service.abandon_idle)
        planner.go_on.set()
        assert answer.result(PATIENCE).status_code == 200
        assert served.act(session, 1, 0.0).status_code == 200


def test_a_failed_plan_can_be_requested_again(controlled: InProcessServer) -> None:
    session = controlled.opened()
    planner_of(controlled).rejections.append(FAILED)
    response = controlled.act(session, 0)
    assert "no answer today" in problem(response, 503)["detail"]
    assert int(response.headers["retry-after"]) >= 1
    assert controlled.act(session, 0).status_code == 200


def test_after_a_failed_plan_the_step_may_have_another_observation(
    controlled: InProcessServer,
) -> None:
    session = controlled.opened()
    bad = Rejection(why=RejectReason.BAD, reason="not this request")
    planner_of(controlled).rejections.extend([FAILED, bad])
    problem(controlled.act(session, 0), 503)
    problem(controlled.act(session, 0, observation=[1, 1, 1]), 422)
    assert controlled.act(session, 0, observation=[2, 2, 2]).status_code == 200
    problem(controlled.act(session, 0), 409)


def test_the_next_step_may_arrive_before_the_last_answer_was_sent(served: InProcessServer) -> None:
    """Between a plan and the request that waits for it another request may run."""

    async def act_twice() -> None:
        service = served.service
        id = service.open(ByReturn.model_validate({})).session
        session = service.sessions.find(id)
        steps = [Step.model_validate({"step": k, "observation": [0, 0, k]}) for k in range(2)]
        first = asyncio.create_task(service.act(id, steps[0], 0.0))
        while session.answer is None:
            await asyncio.sleep(0)
        second = asyncio.create_task(service.act(id, steps[1], 0.0))
        answers = await asyncio.gather(first, second)
        assert [answer.step for answer in answers] == [0, 1]

    served.run(act_twice)


def test_the_planner_gives_up_after_10_seconds_or_at_a_longer_deadline(
    controlled: InProcessServer,
) -> None:
    session = controlled.opened(deadline_ms=60_000)
    controlled.act(session, 0)
    controlled.act(session, 1, 0.0, deadline_ms=50)
    assert planner_of(controlled).hard_deadlines == [60.0, 10.0]


def test_the_number_of_sessions_is_limited() -> None:
    with in_process(max_sessions=2) as served:
        first, _ = served.opened(), served.opened()
        response = served.client.post("/v1/sessions", json={})
        assert "2 sessions are open" in problem(response, 503)["detail"]
        assert int(response.headers["retry-after"]) >= 1
        served.client.delete(f"/v1/sessions/{first}")
        assert served.opened()


def test_idle_sessions_are_ended() -> None:
    clock = Clock()
    with in_process(idle_seconds=60.0, clock=clock) as served:
        idle, used = served.opened(), served.opened()
        clock.now += 59
        assert served.client.get(f"/v1/sessions/{used}").status_code == 200
        clock.now += 1
        served.run(served.service.abandon_idle)
        assert "was idle for 60 seconds" in problem(served.act(idle, 0), 409)["detail"]
        problem(served.end(idle, 0), 409)
        assert served.act(used, 0).status_code == 200


# Deadlines


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock by which every batch takes 10 ms and 1 ms a candidate."""
    clock, compute = Clock(), Policy.compute

    def slowly(policy: Policy, requests: Sequence[PlanRequest]) -> Sequence[Decision]:
        planned = [request for request in requests if request.mode not in UNPLANNED_MODES]
        candidates = sum(request.candidates or 16 for request in planned)
        clock.now += 0.010 + 0.001 * (candidates + len(requests) - len(planned))
        return compute(policy, requests)

    monkeypatch.setattr(Policy, "compute", slowly)
    return clock


def test_there_are_fewer_candidates_as_the_deadline_nears(slow: Clock) -> None:
    """A plan of 16 takes 10 + 16 ms, one of 8 takes 18, one without candidates 11."""
    steps = [{}, {"deadline_ms": 24}, {"deadline_ms": 15}, {"deadline_ms": 5}, {}]
    with in_process(deadline_aware=True, clock=slow) as served:
        session = served.opened(deadline_ms=100)
        answers = [
            served.act(session, step, 0.0 if step else None, **options).json()
            for step, options in enumerate(steps)
        ]
        metrics = served.client.get("/metrics").text
    assert [answer["candidates"] for answer in answers] == [16, 8, 0, 0, 16]
    assert [answer["hurried"] for answer in answers] == [False, True, True, True, False]
    assert [answer["late"] for answer in answers] == [False, False, False, True, False]
    assert [answer["milliseconds"] for answer in answers] == [26, 18, 11, 11, 26]
    assert [answer["deadline_ms"] for answer in answers] == [100, 24, 15, 5, 100]
    unplanned = [answer["utility"] is None for answer in answers]
    assert unplanned == [False, False, True, True, False]
    assert 'm3pc_serve_steps_total{result="ok"} 4.0' in metrics
    assert 'm3pc_serve_steps_total{result="late"} 1.0' in metrics
    assert 'm3pc_serve_candidates_bucket{le="0.0"} 2.0' in metrics


def test_an_answer_with_fewer_candidates_does_not_depend_on_its_batch() -> None:
    policy = Policy(weights())
    window = typical_window(policy)
    alone = policy.answer([PlanRequest(window=window, candidates=8)])[0]
    mixed = policy.answer([PlanRequest(window=window, candidates=n) for n in (16, 8, 5, 8)])
    np.testing.assert_allclose(mixed[1].actions, alone.actions, atol=1e-5)
    np.testing.assert_allclose(mixed[3].actions, alone.actions, atol=1e-5)
    assert not np.allclose(mixed[0].actions, alone.actions, atol=1e-5)
