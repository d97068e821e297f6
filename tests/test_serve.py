"""What robots may ask the server, and what they are told when they ask for nonsense."""

import asyncio
import json
import math
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import ValidationError
from starlette.types import ASGIApp

from m3pc.run.agent import Agent
from m3pc.run.monitor.boards import metric_names, queries
from m3pc.run.monitor.watch import shipped
from m3pc.run.serve.house import House
from m3pc.run.serve.messages import LARGEST, ByReturn, Step
from m3pc.run.serve.problems import ProblemError, of_message
from m3pc.types import Ask, Decision, InputError
from planner.batcher import Batcher
from planner.loader import ordinary
from planner.pace import UNPLANNED
from planner.policy import Policy
from tests.served import (
    ACTIONS,
    HEADERS,
    STATES,
    TOKEN,
    Clock,
    Inside,
    config,
    inside,
    weights,
    write_checkpoint,
)
from tests.small_checkpoint import poke, with_tensors
from tests.waiting import PATIENCE, eventually

ACT = f"/v1/sessions/{'0' * 32}/act"


@pytest.fixture(scope="module")
def served() -> Iterator[Inside]:
    with inside(most=100) as found:
        yield found


def problem(response: Any, status: int) -> dict[str, Any]:
    """What went wrong, in the one shape that it has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    told: dict[str, Any] = response.json()
    assert set(told) == {"title", "status", "detail", "where", "expected_step"}
    assert told["status"] == status
    assert "Traceback" not in told["detail"]
    return told


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

        def later(asks: Sequence[Ask]) -> Sequence[Decision]:
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

    def broken(asks: Sequence[Ask]) -> Sequence[Decision]:
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

    def broken(asks: Sequence[Ask]) -> Sequence[Decision]:
        raise RuntimeError("no answer today")

    def bad(ask: Ask) -> None:
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

    def noted(ask: Ask, seconds: float, **more: Any) -> Any:
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

        def slowly(asks: Sequence[Ask]) -> Sequence[Decision]:
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
    alone = policy.answer([Ask(window=window, candidates=8)])[0]
    mixed = policy.answer([Ask(window=window, candidates=n) for n in (16, 8, 5, 8)])
    np.testing.assert_allclose(mixed[1].actions, alone.actions, atol=1e-5)
    np.testing.assert_allclose(mixed[3].actions, alone.actions, atol=1e-5)
    assert not np.allclose(mixed[0].actions, alone.actions, atol=1e-5)


# Nonsense

GOOD = {"step": 0, "observation": [0.0, 0.0, 0.0]}
BAD_STEPS = {
    "too short": ({**GOOD, "observation": [0, 0]}, "observation has 2 numbers; expected 3"),
    "too long": ({**GOOD, "observation": [0] * 4}, "observation has 4 numbers; expected 3"),
    "empty": ({**GOOD, "observation": []}, "observation is []"),
    "nested": ({**GOOD, "observation": [[0, 0, 0]]}, "observation[0] is [0, 0, 0]"),
    "text": ({**GOOD, "observation": "abc"}, "observation is 'abc'"),
    "a text": ({**GOOD, "observation": [0, "1", 0]}, "observation[1] is '1'"),
    "a truth": ({**GOOD, "observation": [0, True, 0]}, "observation[1] is true"),
    "nothing": ({**GOOD, "observation": None}, "observation is null"),
    "missing": ({"step": 0}, "observation is missing"),
    "huge": ({**GOOD, "observation": [0, 0, 2 * LARGEST]}, "observation[2] is 2000000.0"),
    "no step": ({"observation": [0, 0, 0]}, "step is missing"),
    "part of a step": ({**GOOD, "step": 0.5}, "step is 0.5"),
    "a negative step": ({**GOOD, "step": -1}, "step is -1"),
    "unknown": ({**GOOD, "speed": 1}, "speed is no field of this message"),
    "no time": ({**GOOD, "deadline_ms": 0}, "deadline_ms is 0"),
    "another action": ({**GOOD, "action": [0, 0]}, "action has 2 numbers; expected 1"),
    "an action beyond": ({**GOOD, "action": [1.5]}, "action[0] is 1.5"),
    "no message": ([1, 2], "the message is [1, 2]"),
}


@pytest.mark.parametrize("kind", BAD_STEPS)
def test_a_step_that_makes_no_sense_is_refused_precisely(served: Inside, kind: str) -> None:
    message, words = BAD_STEPS[kind]
    session = served.opened()
    told = problem(served.client.post(f"/v1/sessions/{session}/act", json=message), 422)
    assert words in told["detail"]
    assert served.act(session, 0).status_code == 200, "and changed nothing"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_that_are_none_are_refused(served: Inside, number: str) -> None:
    session = served.opened()
    content = f'{{"step": 0, "observation": [0, {number}, 0]}}'
    response = served.client.post(
        f"/v1/sessions/{session}/act", content=content, headers={"Content-Type": "application/json"}
    )
    told = problem(response, 422)
    assert told["where"] == "observation[1]" and "finite" in told["detail"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_binary_numbers_that_are_none_are_refused(served: Inside, number: float) -> None:
    message = {"step": 0, "observation": struct.pack("<3f", 0, number, 0)}
    response = binary(served, f"/v1/sessions/{served.opened()}/act", msgpack.packb(message))
    assert problem(response, 422)["where"] == "observation[1]"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b"\xff\xfe", b"[" * 50_000, b'{"step": 0} {}', b"\x00"],
)
def test_what_is_no_json_is_refused(served: Inside, content: bytes) -> None:
    response = served.client.post(ACT, content=content)
    assert "the message is no JSON" in problem(response, 422)["detail"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x82\xa4step",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({"step": 0, "observation": b"abc"}),
        msgpack.packb({"step": 0, "observation": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"step": 0, "observation": [0, 0, 0], "x": b"\xff"}),
        msgpack.packb(0) + msgpack.packb(0),
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xa2\xff\xfe",
    ],
)
def test_what_is_no_msgpack_message_is_refused(served: Inside, content: bytes) -> None:
    problem(binary(served, ACT, content), 422)


@pytest.mark.parametrize("depth", [5, 100, 500, 900, 1000, 1020, 1023, 1024])
def test_what_is_nested_is_refused_however_deep(served: Inside, depth: int) -> None:
    nest = b"\x91" * depth + b"\xc0"
    for content in (nest, b"\x81\xa4name" + nest, b"\x82\xa4step\x00\xabobservation" + nest):
        problem(binary(served, ACT, content), 422)
        problem(binary(served, "/v1/sessions", content), 422)


MANY = {
    "numbers": (ACT, b'{"step":0,"observation":[' + b"null," * 10_000 + b"0]}"),
    "rows": ("/v1/sessions", b'{"waypoints":[' + b"[]," * 10_000 + b"[0]]}"),
    "numbers of rows": ("/v1/sessions", b'{"waypoints":[' + b"[null,null]," * 5_000 + b"[0]]}"),
}


@pytest.mark.parametrize("kind", MANY)
def test_of_many_faults_the_first_is_found_and_no_other_is_looked_for(
    served: Inside, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counted(error: ValidationError) -> ProblemError:
        counts.append(error.error_count())
        return of_message(error)

    monkeypatch.setattr("m3pc.run.serve.codec.of_message", counted)
    path, content = MANY[kind]
    problem(served.client.post(path, content=content), 422)
    assert counts == [1]


def test_fields_without_number_are_not_looked_at_one_by_one(served: Inside) -> None:
    fields = {f"{k:x}": 1 for k in range(2_000)}
    for response in (
        served.client.post(ACT, json=fields),
        binary(served, ACT, msgpack.packb(fields)),
    ):
        assert "more than 64 fields" in problem(response, 422)["detail"]


BAD_OPENINGS: dict[str, tuple[Any, str]] = {
    "a goal of another size": ({"goal": [0, 0]}, "goal has 2 numbers; expected 3"),
    "a goal that is none": ({"goal": None}, "goal is null"),
    "no waypoint": ({"waypoints": []}, "waypoints is []"),
    "too many": ({"waypoints": [[0, 0, 0]] * 42}, "waypoints has 42 rows; give 41 at most"),
    "a row that is short": ({"waypoints": [[0] * 3, [0]]}, "waypoints[1] has 1 numbers"),
    "a goal and a ratio": ({"goal": [0] * 3, "ratio": 1}, "ratio is no field"),
    "a goal for a return": ({"goal": [0] * 3, "mode": "q"}, "mode is 'q'"),
    "a mode without its goal": ({"mode": "goal"}, "mode is 'goal'"),
    "a ratio beyond": ({"ratio": 11}, "ratio is 11"),
    "a ratio and a target": ({"ratio": 1, "target": 5}, "both ratio and target are given"),
    "a target for a goal": ({"goal": [0] * 3, "target": 1}, "target is no field"),
    "a target beyond": ({"target": 1e10}, "target is 10000000000.0"),
    "a key that is none": ({"key": ""}, "key is ''"),
    "a seed below 0": ({"seed": -1}, "seed is -1"),
    "a seed beyond": ({"seed": 2**63}, f"seed is {2**63}"),
    "too many steps": ({"step_limit": 41}, "trained for 40 at most"),
    "a name that is none": ({"name": "a b"}, "name is 'a b'"),
    "a name with an end of line": ({"name": "a\n"}, "name is 'a"),
}


@pytest.mark.parametrize("kind", BAD_OPENINGS)
def test_a_session_that_makes_no_sense_is_refused_precisely(served: Inside, kind: str) -> None:
    message, words = BAD_OPENINGS[kind]
    before = len(served.robots.sessions)
    told = problem(served.client.post("/v1/sessions", json=message), 422)
    assert words in told["detail"]
    assert len(served.robots.sessions) == before


def test_a_critic_that_has_not_learned_guides_nobody() -> None:
    with inside(critic=False) as served:
        told = problem(served.client.post("/v1/sessions", json={"mode": "q"}), 422)
        assert "has not learned" in told["detail"]
        assert served.client.get("/v1/weights").json()["modes"] == [
            "rcbc",
            "m",
            "goal",
            "goal-mask",
        ]


def test_another_kind_of_message_is_refused(served: Inside) -> None:
    response = served.client.post(ACT, content=b"x", headers={"Content-Type": "text/xml"})
    assert "'text/xml'" in problem(response, 415)["detail"]


def test_a_message_that_is_too_large_is_refused(served: Inside) -> None:
    largest = (64 << 10) + 32 * STATES * 41

    def pieces() -> Iterator[bytes]:
        for _ in range(largest // 1000 + 1):
            yield b" " * 1000

    for content in (b" " * (largest + 1), pieces()):
        told = problem(served.client.post(ACT, content=content), 413)
        assert f"more than {largest} bytes" in told["detail"]
    problem(served.client.post(ACT, content=b" " * largest), 422)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/weights", "GET, HEAD, POST"),
        ("GET", "/v1/sessions", "POST"),
        ("POST", f"/v1/sessions/{'0' * 32}", "DELETE, GET, HEAD"),
        ("POST", "/livez", "GET, HEAD"),
    ],
)
def test_other_methods_are_refused(served: Inside, method: str, path: str, allowed: str) -> None:
    response = served.client.request(method, path)
    problem(response, 405)
    assert response.headers["allow"] == allowed


def test_other_paths_are_not_there(served: Inside) -> None:
    for path in ("/", "/v1/sessions/", "/v2", "/v1/sessions/a/b/c", "/static/../etc"):
        problem(served.client.get(path), 404)


def test_a_failure_of_our_own_is_a_sentence_too(
    served: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(served.robots, "serving", broken)
    told = problem(served.client.get("/v1/weights"), 500)
    assert "secret" not in told["detail"]


# Binary


def binary(served: Inside, path: str, content: bytes) -> Any:
    return served.client.post(
        path, content=content, headers={"Content-Type": "application/msgpack"}
    )


def test_msgpack_says_the_same_as_json(served: Inside) -> None:
    opened = binary(served, "/v1/sessions", msgpack.packb({"seed": 5}))
    session = msgpack.unpackb(opened.content)["session"]
    other = served.opened(seed=5)
    for step in range(3):
        observation = struct.pack("<3f", step, step + 0.5, -step)
        message = {"step": step, "observation": observation} | ({"reward": 0.0} if step else {})
        response = binary(served, f"/v1/sessions/{session}/act", msgpack.packb(message))
        assert response.headers["content-type"] == "application/msgpack"
        found = msgpack.unpackb(response.content)
        expected = served.act(other, step, 0.0 if step else None).json()
        action = np.frombuffer(found.pop("action"), "<f4")
        np.testing.assert_allclose(action, expected.pop("action"), atol=1e-6)
        ignored = {"milliseconds"}
        assert {n: found[n] for n in found.keys() - ignored} == pytest.approx(
            {n: expected[n] for n in expected.keys() - ignored}
        )
    ended = binary(
        served,
        f"/v1/sessions/{session}/end",
        msgpack.packb({"step": 3, "observation": bytes(12), "reward": 1.5, "truncated": True}),
    )
    assert msgpack.unpackb(ended.content)["total"] == 1.5


def test_waypoints_are_rows_of_bytes_in_msgpack(served: Inside) -> None:
    row = struct.pack("<3f", 1, 2, 3)
    opened = binary(served, "/v1/sessions", msgpack.packb({"waypoints": [row, row]}))
    session = msgpack.unpackb(opened.content)["session"]
    expected = served.act(served.opened(goal=[1, 2, 3]), 0).json()["action"]
    assert served.act(session, 0).json()["action"] == expected


# Who is let in


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer other"},
        {"Authorization": TOKEN},
        {"Authorization": f"bearer  {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer "},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_nobody_comes_in_without_the_token(served: Inside, headers: dict[str, Any]) -> None:
    del served.client.headers["Authorization"]
    try:
        for method, path in (("POST", "/v1/sessions"), ("GET", "/v1/weights"), ("POST", ACT)):
            response = served.client.request(method, path, headers=headers)
            told = problem(response, 401)
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert TOKEN not in told["detail"]
        problem(served.client.get("/nowhere", headers=headers), 401)
    finally:
        served.client.headers |= HEADERS


def test_the_word_before_a_token_may_be_written_in_any_case(served: Inside) -> None:
    for word in ("bearer", "BEARER", "Bearer"):
        headers = {"Authorization": f"{word} {TOKEN}"}
        assert served.client.get("/v1/weights", headers=headers).status_code == 200


def test_health_is_told_to_everybody(served: Inside) -> None:
    del served.client.headers["Authorization"]
    try:
        for path, said in (("/livez", "alive\n"), ("/readyz", "ready\n")):
            response = served.client.get(path)
            assert (response.status_code, response.text) == (200, said)
        assert "m3pc_serve_sessions" in served.client.get("/metrics").text
    finally:
        served.client.headers |= HEADERS


def test_everything_that_boards_draw_of_robots_is_told(served: Inside) -> None:
    session = served.opened()
    served.walk(session, 2)
    served.end(session, 2, 0.0)
    drawn = {name for query in queries(shipped(), "") for name in metric_names(query.expression)}
    wanted = {name for name in drawn if name.startswith("m3pc_serve_")}
    lines = served.client.get("/metrics").text.splitlines()
    assert len(wanted) == 6
    assert wanted <= {re.split("[{ ]", line)[0] for line in lines}


def test_a_planner_that_ended_is_not_ready() -> None:
    with inside() as served:
        served.service.close()
        response = served.client.get("/readyz")
        assert (response.status_code, response.text) == (503, "the planner does not answer\n")
        assert served.client.get("/livez").status_code == 200


def test_metrics_may_have_a_token_of_their_own() -> None:
    with inside(metrics_token="for prometheus") as served:
        problem(served.client.get("/metrics"), 401)
        allowed = {"Authorization": "Bearer for prometheus"}
        assert served.client.get("/metrics", headers=allowed).status_code == 200


def test_a_page_of_another_site_is_refused(served: Inside) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        problem(served.client.get("/v1/weights", headers=headers), 403)


def test_without_a_token_only_own_names_are_answered() -> None:
    with inside(token=None) as served:
        assert served.client.get("/v1/weights").status_code == 200
        problem(served.client.get("/v1/weights", headers={"Host": "evil.example:8400"}), 421)


def test_who_has_the_token_may_use_any_name(served: Inside) -> None:
    own = {"Host": "planner.lab.example"}
    assert served.client.get("/v1/weights", headers=own).status_code == 200
    problem(served.client.get("/metrics", headers=own), 421)


# Weights


def test_weights_are_swapped_and_sessions_go_on(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one", weights(7))
    with inside(source=path) as served:
        session = served.opened(seed=5)
        assert [each["version"] for each in served.walk(session, 2)] == ["0-7", "0-7"]
        write_checkpoint(path, weights(8))
        assert served.client.post("/v1/weights").json()["version"] == "0-8"
        told = served.act(session, 2, 1.0).json()
        assert told["version"] == "0-8"
        agent = Agent(Policy(weights(7)))
        agent.reset(seed=5)
        for step in range(2):
            agent.act([step, step + 0.5, -step])
        agent.policy = Policy(weights(8))
        np.testing.assert_allclose(told["action"], agent.act([2, 2.5, -2]), atol=1e-4)


def test_weights_that_do_not_fit_are_refused_and_the_old_go_on(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with inside(source=path) as served:
        session = served.opened()

        def refused(words: str) -> None:
            assert words in problem(served.client.post("/v1/weights"), 422)["detail"]
            assert served.client.get("/v1/weights").json()["version"] == "0-7"

        refused("is not a checkpoint")
        write_checkpoint(path, weights(8, states=4))
        refused("not taken (shape)")
        write_checkpoint(path, weights(9))
        with_tensors(path, poke(math.nan))
        refused("NaN or Inf")
        (path / "weights.safetensors").write_bytes(b"rubbish")
        refused("was changed")
        assert served.act(session, 0).json()["version"] == "0-7"
        counted = served.client.get("/metrics").text
        assert 'm3pc_planner_weights_rejected_total{reason="shape"} 1.0' in counted


def test_weights_of_another_environment_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one", replace(weights(8), env="Other-v1"))
    with inside(source=path) as served:
        told = problem(served.client.post("/v1/weights"), 422)
        assert "trained for Other-v1, not for Pendulum-v1" in told["detail"]
        assert served.client.get("/v1/weights").json()["version"] == "0-7"


def modes(served: Inside) -> tuple[list[str], list[str]]:
    """That are told, and that the document allows."""
    schema = served.client.get("/openapi.json").json()["components"]["schemas"]["ByReturn"]
    (listed,) = (x["enum"] for x in schema["properties"]["mode"]["anyOf"] if "enum" in x)
    return served.client.get("/v1/weights").json()["modes"], listed


def test_a_critic_that_has_learned_since_may_guide(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one", weights(8), critic_updates=3)
    with inside(source=path, critic=False) as served:
        assert all("q" not in each for each in modes(served))
        problem(served.client.post("/v1/sessions", json={"mode": "q"}), 422)
        assert served.client.post("/v1/weights").json()["version"] == "0-8"
        assert all("q" in each for each in modes(served))
        assert served.act(served.opened(mode="q"), 0).status_code == 200


def test_a_critic_that_has_not_learned_takes_the_place_of_none_that_is_asked(
    tmp_path: Path,
) -> None:
    path = write_checkpoint(tmp_path / "one", weights(8), critic_updates=0)
    with inside(source=path) as served:
        guided = served.opened(mode="q0")
        told = problem(served.client.post("/v1/weights"), 422)
        assert "has not learned yet, and 1 open sessions plan by it" in told["detail"]
        assert served.client.get("/v1/weights").json()["version"] == "0-7"
        assert all("q" in each for each in modes(served))
        served.client.delete(f"/v1/sessions/{guided}")
        assert served.client.post("/v1/weights").json()["version"] == "0-8"
        assert all("q" not in each for each in modes(served))
    with inside(source=path, settings=config(planner__mode="q")) as served:
        assert "the server plans by it" in problem(served.client.post("/v1/weights"), 422)["detail"]


def test_weights_that_follow_a_run_are_not_read_by_hand(served: Inside) -> None:
    assert "by themselves" in problem(served.client.post("/v1/weights"), 409)["detail"]


# The document and its page


def test_the_document_has_the_sizes_of_the_model(served: Inside) -> None:
    told = served.client.get("/openapi.json").json()
    schemas = told["components"]["schemas"]
    observation = schemas["Step"]["properties"]["observation"]
    assert (observation["minItems"], observation["maxItems"]) == (STATES, STATES)
    limit = schemas["ByReturn"]["properties"]["step_limit"]["anyOf"][0]
    assert (limit["minimum"], limit["maximum"]) == (1, 40)
    action = schemas["Acted"]["properties"]["action"]
    assert (action["minItems"], action["maxItems"]) == (ACTIONS, ACTIONS)
    assert set(told["paths"]) == {
        *("/v1/sessions", "/v1/sessions/{session}", "/v1/sessions/{session}/act"),
        *("/v1/sessions/{session}/end", "/v1/weights", "/livez", "/readyz", "/metrics"),
    }
    for path, method in (("/v1/sessions", "201"), ("/v1/sessions/{session}/act", "200")):
        operation = told["paths"][path]["post"]
        for message in (operation["requestBody"], operation["responses"][method]):
            assert set(message["content"]) == {"application/json", "application/msgpack"}
    text = json.dumps(told)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(schemas)


def test_the_page_needs_nothing_from_elsewhere(served: Inside) -> None:
    response = served.client.get("/docs")
    page = response.text
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for word in ("<script", "http://", "https://", "src=", "@import", "url("):
        assert word not in page
    assert "POST /v1/sessions/{session}/act" in page
    assert f"{STATES} times number from -1e+06 to 1e+06" in page
    assert "Not now: another step is expected" in page


def test_every_answer_says_how_it_may_be_used(served: Inside) -> None:
    for path in ("/livez", "/docs", "/v1/weights", "/nowhere"):
        headers = served.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_a_backward_planner_is_no_default() -> None:
    policy = Policy(weights(settings=config(planner__mode="goal")))
    with pytest.raises(InputError, match="needs states to reach; serve with"):
        House.of(policy, critic=True, deadline=1.0, most=1, idle=1.0)


def test_who_sends_a_message_too_slowly_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m3pc.run.serve.guard.READ_SECONDS", 0.05)
    sent: list[Any] = []

    async def drip() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
    scope = {"type": "http", "path": ACT, "method": "POST", "headers": headers}

    async def ask(app: ASGIApp) -> None:
        await app(scope, drip, send)

    with inside() as found:
        asyncio.run(ask(found.app))
    assert sent[0]["status"] == 408
    assert b"did not arrive within" in sent[1]["body"]
