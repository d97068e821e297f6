"""Who is let in to the server, which weights it has, and what it says of itself."""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import ASGIApp

from m3pc.evaluation.agent import Agent
from m3pc.monitoring.dashboards import metric_names, queries
from m3pc.monitoring.services import shipped
from m3pc.serving.service_spec import ServiceSpec
from m3pc.types import InputError
from planner.policy import Policy
from tests.support.models.small_checkpoint import poke, with_tensors
from tests.support.servers.served import (
    ACTIONS,
    HEADERS,
    STATES,
    TOKEN,
    Inside,
    config,
    inside,
    problem,
    weights,
    write_checkpoint,
)

ACT = f"/v1/sessions/{'0' * 32}/act"


@pytest.fixture(scope="module")
def served() -> Iterator[Inside]:
    with inside(most=100) as found:
        yield found


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
        ServiceSpec.of(policy, critic=True, deadline=1.0, most=1, idle=1.0)


def test_who_sends_a_message_too_slowly_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m3pc.serving.request_guard.READ_SECONDS", 0.05)
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
