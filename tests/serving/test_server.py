"""What robots may ask the server, one at a time and many at once, and in which time."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from m3pc.evaluation.agent import Agent
from m3pc.serving.messages import ByReturn, Step
from m3pc.types import Decision, InputError, PlanRequest
from planner.latency_model import UNPLANNED
from planner.policy import Policy
from planner.server.batcher import Batcher
from planner.server.weights_loader import ordinary
from tests.support.servers.served import (
    ACTIONS,
    STATES,
    Clock,
    Inside,
    config,
    inside,
    problem,
    weights,
)
from tests.support.servers.waiting import PATIENCE, eventually


@pytest.fixture(scope="module")
def served() -> Iterator[Inside]:
    with inside(most=100) as found:
        yield found


# Acting


def test_a_session_says_what_it_is_about(served: Inside) -> None:
    told = served.client.post("/v1/sessions", json={"name": "arm-1", "mode": "q"}).json()
    assert (told["state_size"], told["action_size"], told["step_limit"]) == (STATES, ACTIONS, 40)
    assert (told["mode"], told["name"], told["candidates"]) == ("q", "arm-1", 16)
    assert (told["version"], told["env"], told["recorded"]) == ("0-7", "Pendulum-v1", False)


def test_actions_are_those_of_an_agent_that_saw_the_same(served: Inside) -> None:
    agent = Agent(Policy(weights()))
    agent.reset(seed=5)
    found = served.walk(served.opened(seed=5), 7)
    for step, told in enumerate(found):
        expected = agent.act([step, step + 0.5, -step])
        np.testing.assert_allclose(told["action"], expected, atol=1e-4)
        assert told["step"] == step and told["version"] == "0-7"
        assert (told["candidates"], told["hurried"], told["late"]) == (16, False, False)
        assert told["utility"] is not None and told["effective"] >= 1


@pytest.mark.parametrize("mode", ["rcbc", "m", "q", "q0"])
def test_a_session_has_a_mode_and_a_ratio_of_its_own(served: Inside, mode: str) -> None:
    found = [served.act(served.opened(mode=mode, ratio=ratio), 0).json() for ratio in (0.5, 1.0)]
    assert found[0]["condition"] == pytest.approx(found[1]["condition"] / 2)
    assert found[0]["candidates"] == (0 if mode == "rcbc" else 16)
    assert (found[0]["utility"] is None) == (mode == "rcbc")


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ({}, [30 / 40, (30 - 5) / 39, (30 - 5 - 8) / 38]),
        ({"returns__mode": "sum"}, [30, 30 - 5, 30 - 5 - 8]),
    ],
    ids=["average", "sum"],
)
def test_a_session_may_ask_for_a_return_in_rewards(
    returns: dict[str, Any], expected: list[float]
) -> None:
    """What was earned is not asked for again. An episode has 40 steps."""
    with inside(settings=config(**returns)) as served:
        session = served.opened(target=30.0)
        found = [served.act(session, k, r).json() for k, r in enumerate([None, 5.0, 8.0])]
        assert [each["condition"] for each in found] == pytest.approx(expected)
        message = {"step": 3, "observation": [0, 0, 0]}
        response = served.client.post(f"/v1/sessions/{session}/act", json=message)
        assert "a target was given" in problem(response, 409)["detail"]


@pytest.mark.parametrize("mode", ["average", "sum"])
def test_the_best_return_as_a_target_asks_for_what_a_ratio_of_one_does(mode: str) -> None:
    """The envelope of these weights begins at 2: of 40 steps, or in all."""
    with inside(settings=config(returns__mode=mode)) as served:
        best = served.client.get("/v1/weights").json()["best_return"]
        assert best == pytest.approx(2 * (40 if mode == "average" else 1))
        told = served.client.post("/v1/sessions", json={"target": best}).json()
        assert told["best_return"] == best
        one, other = told["session"], served.opened(ratio=1.0)
        conditions = [served.act(each, 0).json()["condition"] for each in (one, other)]
        assert conditions[0] == pytest.approx(conditions[1])


def test_a_session_goes_to_a_goal_or_along_waypoints(served: Inside) -> None:
    goal = [1.0, 2.0, 3.0]
    ways: list[dict[str, Any]] = [
        {"goal": goal},
        {"waypoints": [goal]},
        {"waypoints": [goal] * 41},
        {"goal": [-1.0, 0.0, 0.0]},
        {"goal": goal, "mode": "goal-mask"},
    ]
    found = [served.act(served.opened(**way), 0).json() for way in ways]
    actions = [each["action"] for each in found]
    assert actions[0] == actions[1] == actions[2], "the last waypoint is stayed at"
    assert actions[3] != actions[0] and actions[4] != actions[0]
    assert found[0]["condition"] is None and found[0]["candidates"] == 0


def test_exploring_is_another_way_to_act(served: Inside) -> None:
    calm, bold = (served.act(served.opened(explore=explore), 0).json() for explore in (False, True))
    assert calm["action"] != bold["action"]


def test_a_step_that_is_sent_again_gets_the_same_answer(served: Inside) -> None:
    session = served.opened()
    first = served.walk(session, 3)[-1]
    assert served.act(session, 2, 1.0).json() == first
    assert served.client.get(f"/v1/sessions/{session}").json()["steps"] == 3
    assert served.act(session, 3, 2.0).status_code == 200


def test_a_gap_is_refused_and_says_which_step_is_expected(served: Inside) -> None:
    session = served.opened()
    served.walk(session, 2)
    told = problem(served.act(session, 5, 1.0), 409)
    assert told["expected_step"] == 2
    assert "step 5 was sent, expected 2, or 1 again" in told["detail"]


def test_a_reward_before_anything_was_done_is_refused(served: Inside) -> None:
    session = served.opened()
    told = problem(served.act(session, 0, 1.0), 409)
    assert "reward is given at step 0" in told["detail"] and told["expected_step"] == 0
    assert served.act(session, 0).status_code == 200


def test_whole_numbers_may_be_written_with_a_point(served: Inside) -> None:
    session = served.opened(step_limit=9.0, seed=2.0)
    assert served.act(session, 0, deadline_ms=1000).status_code == 200
    message = {"step": 1.0, "observation": [0, 0, 0]}
    assert served.client.post(f"/v1/sessions/{session}/act", json=message).status_code == 200


def test_a_session_can_be_looked_at_and_left(served: Inside) -> None:
    session = served.opened(name="one", step_limit=9)
    served.walk(session, 3)
    told = served.client.get(f"/v1/sessions/{session}").json()
    assert (told["steps"], told["total"], told["step_limit"]) == (3, 0 + 1, 9)
    assert served.client.delete(f"/v1/sessions/{session}").status_code == 204
    for response in (
        served.client.delete(f"/v1/sessions/{session}"),
        served.client.get(f"/v1/sessions/{session}"),
        served.act(session, 3, 2.0),
        served.end(session, 3, 2.0),
    ):
        assert "there is no such session" in problem(response, 404)["detail"]


def test_an_end_is_told_once_and_may_be_repeated(served: Inside) -> None:
    session = served.opened()
    served.walk(session, 2)
    first = served.end(session, 2, 1.0, terminated=True)
    assert first.json() == {
        "steps": 2, "total": 1.0, "stored": "no store", "slot": None, "reason": ""
    }  # fmt: skip
    assert served.end(session, 2, 1.0, terminated=True).json() == first.json()
    assert "ended by its robot" in problem(served.end(session, 2, 5.0), 409)["detail"]


def test_a_session_that_was_ended_is_remembered_but_goes_on_no_more(served: Inside) -> None:
    session = served.opened()
    served.walk(session, 2)
    served.end(session, 2, 1.0, terminated=True)
    assert "ended by its robot" in problem(served.act(session, 2, 1.0), 409)["detail"]
    told = served.client.get(f"/v1/sessions/{session}").json()
    assert (told["ended"], told["steps"], told["total"]) == (True, 2, 1.0)
    assert served.client.delete(f"/v1/sessions/{session}").status_code == 204
    problem(served.client.get(f"/v1/sessions/{session}"), 404)


def test_a_robot_that_comes_back_takes_the_place_of_itself(served: Inside) -> None:
    before, other = served.opened(name="arm"), served.opened(name="leg")
    again = served.opened(name="arm")
    assert "was replaced by another one" in problem(served.act(before, 0), 409)["detail"]
    assert served.act(again, 0).status_code == served.act(other, 0).status_code == 200


# Many at a time


class Held:
    """Plans wait until they are let go."""

    def __init__(self, served: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.begun = 0
        answer = served.service._batcher._serving[0]

        def later(asks: Sequence[PlanRequest]) -> Sequence[Decision]:
            self.begun += 1
            assert self.go_on.wait(PATIENCE)
            return answer(asks)

        batcher: Batcher = served.service._batcher
        monkeypatch.setattr(batcher, "_serving", (later, batcher._serving[1]))


def test_who_asks_again_while_it_is_planned_waits_for_the_same_plan(
    served: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = served.opened()
    held = Held(served, monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        one = pool.submit(served.act, session, 0)
        assert eventually(lambda: held.begun)
        other, early = pool.submit(served.act, session, 0), pool.submit(served.act, session, 1, 0.0)
        assert problem(early.result(PATIENCE), 409)["expected_step"] == 0
        held.go_on.set()
        assert one.result(PATIENCE).json() == other.result(PATIENCE).json()
    assert held.begun == 1


def test_who_waits_for_a_plan_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with inside(clock=clock, idle=5.0) as served, ThreadPoolExecutor(1) as pool:
        session = served.opened()
        with monkeypatch.context() as patched:
            held = Held(served, patched)
            one = pool.submit(served.act, session, 0)
            assert eventually(lambda: held.begun)
            clock.now += 6
            served.run(served.robots.sweep)
            held.go_on.set()
            assert one.result(PATIENCE).status_code == 200
        assert served.act(session, 1, 0.0).status_code == 200


def test_a_plan_that_failed_can_be_asked_for_again(
    served: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, batcher = served.opened(), served.service._batcher

    def broken(asks: Sequence[PlanRequest]) -> Sequence[Decision]:
        raise RuntimeError("no answer today")

    with monkeypatch.context() as patched:
        patched.setattr(batcher, "_serving", (broken, batcher._serving[1]))
        response = served.act(session, 0)
    assert "no answer today" in problem(response, 503)["detail"]
    assert int(response.headers["retry-after"]) >= 1
    assert served.act(session, 0).status_code == 200


def test_after_a_plan_that_failed_the_robot_may_be_elsewhere(
    served: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, batcher = served.opened(), served.service._batcher
    before = batcher._serving

    def broken(asks: Sequence[PlanRequest]) -> Sequence[Decision]:
        raise RuntimeError("no answer today")

    def bad(ask: PlanRequest) -> None:
        raise InputError("not this question")

    with monkeypatch.context() as patched:
        patched.setattr(batcher, "_serving", (broken, before[1]))
        problem(served.act(session, 0), 503)
        patched.setattr(batcher, "_serving", (before[0], bad))
        problem(served.act(session, 0, observation=[1, 1, 1]), 422)
    assert served.act(session, 0, observation=[2, 2, 2]).status_code == 200
    problem(served.act(session, 0), 409)


def test_the_next_step_may_come_before_the_last_answer_was_sent(served: Inside) -> None:
    """Between a plan and whoever waits for it another request has its turn."""

    async def asked() -> None:
        robots = served.robots
        id = robots.open(ByReturn.model_validate({})).session
        session = robots.sessions.find(id)
        steps = [Step.model_validate({"step": k, "observation": [0, 0, k]}) for k in range(2)]
        first = asyncio.create_task(robots.act(id, steps[0], 0.0))
        while session.answer is None:
            await asyncio.sleep(0)
        second = asyncio.create_task(robots.act(id, steps[1], 0.0))
        found = await asyncio.gather(first, second)
        assert [each.step for each in found] == [0, 1]

    served.run(asked)


def test_a_deadline_may_be_longer_than_anybody_else_waits(
    served: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    submit = served.service.submit

    def noted(ask: PlanRequest, seconds: float, **more: Any) -> Any:
        given.append(seconds)
        return submit(ask, seconds, **more)

    monkeypatch.setattr(served.service, "submit", noted)
    session = served.opened(deadline_ms=60_000)
    served.act(session, 0)
    served.act(session, 1, 0.0, deadline_ms=50)
    assert given == [60.0, 10.0]


def test_there_is_room_for_so_many_robots() -> None:
    with inside(most=2) as served:
        first, _ = served.opened(), served.opened()
        response = served.client.post("/v1/sessions", json={})
        assert "2 sessions are open" in problem(response, 503)["detail"]
        assert int(response.headers["retry-after"]) >= 1
        served.client.delete(f"/v1/sessions/{first}")
        assert served.opened()


def test_who_is_idle_for_too_long_is_let_go() -> None:
    clock = Clock()
    with inside(idle=60.0, clock=clock) as served:
        idle, used = served.opened(), served.opened()
        clock.now += 59
        assert served.client.get(f"/v1/sessions/{used}").status_code == 200
        clock.now += 1
        served.run(served.robots.sweep)
        assert "was idle for 60 seconds" in problem(served.act(idle, 0), 409)["detail"]
        problem(served.end(idle, 0), 409)
        assert served.act(used, 0).status_code == 200


# Time


class Slow:
    """Answers that take as long as they say, by the batcher's clock and the server's."""

    def __init__(self, served: Inside, clock: Clock, *, fixed: float, each: float) -> None:
        batcher, service = served.service._batcher, served.service
        answer, check = batcher._serving
        self.counts: list[int] = []

        def slowly(asks: Sequence[PlanRequest]) -> Sequence[Decision]:
            plans = [1 if (ask.mode or "m") in UNPLANNED else ask.candidates or 16 for ask in asks]
            self.counts += plans
            clock.now += fixed + each * sum(plans)
            return answer(asks)

        batcher._serving = slowly, check
        assert service.pace is not None
        costs = type(next(iter(service.pace._costs.values())))(fixed=fixed, each=each)
        service.pace._costs = dict.fromkeys(service.pace._costs, costs)
        service.pace._first = dict(service.pace._costs)


def test_there_are_fewer_candidates_as_the_deadline_nears() -> None:
    """A plan of 16 takes 10 + 16 ms, one of 8 takes 18, one without candidates 11."""
    clock = Clock()
    with inside(paced=True, clock=clock) as served:
        Slow(served, clock, fixed=0.010, each=0.001)
        session = served.opened(deadline_ms=100)
        found = [
            served.act(session, step, 0.0 if step else None, **more).json()
            for step, more in enumerate(
                [{}, {"deadline_ms": 24}, {"deadline_ms": 15}, {"deadline_ms": 5}, {}]
            )
        ]
        metrics = served.client.get("/metrics").text
    assert [each["candidates"] for each in found] == [16, 8, 0, 0, 16]
    assert [each["hurried"] for each in found] == [False, True, True, True, False]
    assert [each["late"] for each in found] == [False, False, False, True, False]
    assert [each["milliseconds"] for each in found] == [26, 18, 11, 11, 26]
    assert [each["deadline_ms"] for each in found] == [100, 24, 15, 5, 100]
    assert [each["utility"] is None for each in found] == [False, False, True, True, False]
    assert 'm3pc_serve_steps_total{result="ok"} 4.0' in metrics
    assert 'm3pc_serve_steps_total{result="late"} 1.0' in metrics
    assert 'm3pc_serve_candidates_bucket{le="0.0"} 2.0' in metrics


def test_an_answer_with_fewer_candidates_is_the_same_in_any_company() -> None:
    policy = Policy(weights())
    window = ordinary(policy)
    alone = policy.answer([PlanRequest(window=window, candidates=8)])[0]
    mixed = policy.answer([PlanRequest(window=window, candidates=n) for n in (16, 8, 5, 8)])
    np.testing.assert_allclose(mixed[1].actions, alone.actions, atol=1e-5)
    np.testing.assert_allclose(mixed[3].actions, alone.actions, atol=1e-5)
    assert not np.allclose(mixed[0].actions, alone.actions, atol=1e-5)
