"""How malformed requests are answered, and messages in msgpack."""

import math
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from m3pc.serving.messages import MAX_NUMBER, Opening, Step
from tests.support.servers.served import STATES, InProcessServer, in_process, problem

ACT = f"/v1/sessions/{'0' * 32}/act"


@pytest.fixture(scope="module")
def served() -> Iterator[InProcessServer]:
    with in_process(max_sessions=100) as server:
        yield server


# Malformed

GOOD = {"step": 0, "observation": [0.0, 0.0, 0.0]}
BAD_STEPS = {
    "too short": ({**GOOD, "observation": [0, 0]}, "observation has 2 numbers; expected 3"),
    "too long": ({**GOOD, "observation": [0] * 4}, "observation has 4 numbers; expected 3"),
    "empty": ({**GOOD, "observation": []}, "observation is []"),
    "nested": ({**GOOD, "observation": [[0, 0, 0]]}, "observation[0] is [0, 0, 0]"),
    "text": ({**GOOD, "observation": "abc"}, "observation is 'abc'"),
    "text among numbers": ({**GOOD, "observation": [0, "1", 0]}, "observation[1] is '1'"),
    "a boolean": ({**GOOD, "observation": [0, True, 0]}, "observation[1] is true"),
    "nothing": ({**GOOD, "observation": None}, "observation is null"),
    "missing": ({"step": 0}, "observation is missing"),
    "huge": ({**GOOD, "observation": [0, 0, 2 * MAX_NUMBER]}, "observation[2] is 2000000.0"),
    "no step": ({"observation": [0, 0, 0]}, "step is missing"),
    "a fraction of a step": ({**GOOD, "step": 0.5}, "step is 0.5"),
    "a negative step": ({**GOOD, "step": -1}, "step is -1"),
    "unknown": ({**GOOD, "speed": 1}, "speed is no field of this message"),
    "no time": ({**GOOD, "deadline_ms": 0}, "deadline_ms is 0"),
    "another action": ({**GOOD, "action": [0, 0]}, "action has 2 numbers; expected 1"),
    "an action beyond": ({**GOOD, "action": [1.5]}, "action[0] is 1.5"),
    "no message": ([1, 2], "the message is [1, 2]"),
}


@pytest.mark.parametrize("kind", BAD_STEPS)
def test_a_malformed_step_is_refused_with_its_reason(served: InProcessServer, kind: str) -> None:
    message, words = BAD_STEPS[kind]
    session = served.opened()
    refusal = problem(served.client.post(f"/v1/sessions/{session}/act", json=message), 422)
    assert words in refusal["detail"]
    assert served.act(session, 0).status_code == 200, "nothing was changed"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_that_are_not_finite_are_refused(served: InProcessServer, number: str) -> None:
    session = served.opened()
    content = f'{{"step": 0, "observation": [0, {number}, 0]}}'
    response = served.client.post(
        f"/v1/sessions/{session}/act", content=content, headers={"Content-Type": "application/json"}
    )
    refusal = problem(response, 422)
    assert refusal["where"] == "observation[1]" and "finite" in refusal["detail"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_binary_numbers_that_are_not_finite_are_refused(
    served: InProcessServer, number: float
) -> None:
    message = {"step": 0, "observation": struct.pack("<3f", 0, number, 0)}
    response = binary(served, f"/v1/sessions/{served.opened()}/act", msgpack.packb(message))
    assert problem(response, 422)["where"] == "observation[1]"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b"\xff\xfe", b"[" * 50_000, b'{"step": 0} {}', b"\x00"],
)
def test_bytes_that_are_no_json_are_refused(served: InProcessServer, content: bytes) -> None:
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
def test_bytes_that_are_no_msgpack_message_are_refused(
    served: InProcessServer, content: bytes
) -> None:
    problem(binary(served, ACT, content), 422)


@pytest.mark.parametrize("depth", [5, 100, 500, 900, 1000, 1020, 1023, 1024])
def test_nested_values_are_refused_however_deep(served: InProcessServer, depth: int) -> None:
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
def test_only_the_first_of_many_faults_is_looked_for(kind: str) -> None:
    """Listing all of them would block the server."""
    path, content = MANY[kind]
    message: TypeAdapter[Any] = TypeAdapter(Step if path == ACT else Opening)
    with pytest.raises(ValidationError) as caught:
        message.validate_json(content)
    assert caught.value.error_count() == 1


def test_messages_with_too_many_fields_are_not_validated(served: InProcessServer) -> None:
    fields = {f"{k:x}": 1 for k in range(2_000)}
    for response in (
        served.client.post(ACT, json=fields),
        binary(served, ACT, msgpack.packb(fields)),
    ):
        assert "more than 64 fields" in problem(response, 422)["detail"]


BAD_OPENINGS: dict[str, tuple[Any, str]] = {
    "a goal of another size": ({"goal": [0, 0]}, "goal has 2 numbers; expected 3"),
    "no goal": ({"goal": None}, "goal is null"),
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
    "an empty key": ({"key": ""}, "key is ''"),
    "a seed below 0": ({"seed": -1}, "seed is -1"),
    "a seed beyond": ({"seed": 2**63}, f"seed is {2**63}"),
    "too many steps": ({"step_limit": 41}, "trained for 40 at most"),
    "a name with a space": ({"name": "a b"}, "name is 'a b'"),
    "a name with an end of line": ({"name": "a\n"}, "name is 'a"),
}


@pytest.mark.parametrize("kind", BAD_OPENINGS)
def test_a_malformed_opening_is_refused_with_its_reason(served: InProcessServer, kind: str) -> None:
    message, words = BAD_OPENINGS[kind]
    before = len(served.service.sessions)
    refusal = problem(served.client.post("/v1/sessions", json=message), 422)
    assert words in refusal["detail"]
    assert len(served.service.sessions) == before


def test_an_untrained_critic_guides_no_session() -> None:
    with in_process(critic_trained=False) as served:
        refusal = problem(served.client.post("/v1/sessions", json={"mode": "q"}), 422)
        assert "has not learned" in refusal["detail"]
        modes = served.client.get("/v1/weights").json()["modes"]
        assert modes == ["rcbc", "m", "goal", "goal-mask"]


def test_other_content_types_are_refused(served: InProcessServer) -> None:
    response = served.client.post(ACT, content=b"x", headers={"Content-Type": "text/xml"})
    assert "'text/xml'" in problem(response, 415)["detail"]


def test_a_message_that_is_too_large_is_refused(served: InProcessServer) -> None:
    max_body = (64 << 10) + 32 * STATES * 41

    def chunks() -> Iterator[bytes]:
        for _ in range(max_body // 1000 + 1):
            yield b" " * 1000

    for content in (b" " * (max_body + 1), chunks()):
        refusal = problem(served.client.post(ACT, content=content), 413)
        assert f"more than {max_body} bytes" in refusal["detail"]
    problem(served.client.post(ACT, content=b" " * max_body), 422)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/weights", "GET, HEAD, POST"),
        ("GET", "/v1/sessions", "POST"),
        ("POST", f"/v1/sessions/{'0' * 32}", "DELETE, GET, HEAD"),
        ("POST", "/livez", "GET, HEAD"),
    ],
)
def test_other_methods_are_refused(
    served: InProcessServer, method: str, path: str, allowed: str
) -> None:
    response = served.client.request(method, path)
    problem(response, 405)
    assert response.headers["allow"] == allowed


def test_other_paths_are_not_found(served: InProcessServer) -> None:
    for path in ("/", "/v1/sessions/", "/v2", "/v1/sessions/a/b/c", "/static/../etc"):
        problem(served.client.get(path), 404)


def test_an_internal_failure_reveals_nothing(
    served: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("an internal secret")

    monkeypatch.setattr(served.service, "model_info", broken)
    refusal = problem(served.client.get("/v1/weights"), 500)
    assert "secret" not in refusal["detail"]


# Binary


def binary(served: InProcessServer, path: str, content: bytes) -> Any:
    return served.client.post(
        path, content=content, headers={"Content-Type": "application/msgpack"}
    )


def test_msgpack_and_json_give_the_same_answers(served: InProcessServer) -> None:
    opened = binary(served, "/v1/sessions", msgpack.packb({"seed": 5}))
    session = msgpack.unpackb(opened.content)["session"]
    other = served.opened(seed=5)
    for step in range(3):
        observation = struct.pack("<3f", step, step + 0.5, -step)
        message = {"step": step, "observation": observation} | ({"reward": 0.0} if step else {})
        response = binary(served, f"/v1/sessions/{session}/act", msgpack.packb(message))
        assert response.headers["content-type"] == "application/msgpack"
        answer = msgpack.unpackb(response.content)
        expected = served.act(other, step, 0.0 if step else None).json()
        action = np.frombuffer(answer.pop("action"), "<f4")
        np.testing.assert_allclose(action, expected.pop("action"), atol=1e-6)
        del answer["milliseconds"], expected["milliseconds"]
        assert answer == pytest.approx(expected)
    ended = binary(
        served,
        f"/v1/sessions/{session}/end",
        msgpack.packb({"step": 3, "observation": bytes(12), "reward": 1.5, "truncated": True}),
    )
    assert msgpack.unpackb(ended.content)["total"] == 1.5


def test_waypoints_are_rows_of_bytes_in_msgpack(served: InProcessServer) -> None:
    row = struct.pack("<3f", 1, 2, 3)
    opened = binary(served, "/v1/sessions", msgpack.packb({"waypoints": [row, row]}))
    session = msgpack.unpackb(opened.content)["session"]
    expected = served.act(served.opened(goal=[1, 2, 3]), 0).json()["action"]
    assert served.act(session, 0).json()["action"] == expected
