"""Which requests are admitted, which weights answer, and how the server documents itself."""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.evaluation.agent import Agent
from m3pc.monitoring.dashboards import metric_names
from m3pc.serving.request_guard import RequestGuard
from m3pc.serving.service_spec import ServiceSpec
from m3pc.types import InputError
from planner.policy import Policy
from tests.support.models.small_checkpoint import poke, with_tensors
from tests.support.servers.served import (
    ACTIONS,
    HEADERS,
    STATES,
    TOKEN,
    InProcessServer,
    config,
    in_process,
    problem,
    weights,
    write_checkpoint,
)
from tests.support.servers.shipped_monitoring import run_queries

ACT = f"/v1/sessions/{'0' * 32}/act"


@pytest.fixture(scope="module")
def served() -> Iterator[InProcessServer]:
    with in_process(max_sessions=100) as server:
        yield server


# Admission


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
def test_requests_without_the_token_are_refused(
    served: InProcessServer, headers: dict[str, Any]
) -> None:
    del served.client.headers["Authorization"]
    try:
        for method, path in (("POST", "/v1/sessions"), ("GET", "/v1/weights"), ("POST", ACT)):
            response = served.client.request(method, path, headers=headers)
            refusal = problem(response, 401)
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert TOKEN not in refusal["detail"]
        problem(served.client.get("/nowhere", headers=headers), 401)
    finally:
        served.client.headers |= HEADERS


def test_the_scheme_before_a_token_may_be_written_in_any_case(served: InProcessServer) -> None:
    for scheme in ("bearer", "BEARER", "Bearer"):
        headers = {"Authorization": f"{scheme} {TOKEN}"}
        assert served.client.get("/v1/weights", headers=headers).status_code == 200


def test_health_needs_no_token(served: InProcessServer) -> None:
    del served.client.headers["Authorization"]
    try:
        for path, text in (("/livez", "alive\n"), ("/readyz", "ready\n")):
            response = served.client.get(path)
            assert (response.status_code, response.text) == (200, text)
        assert "m3pc_serve_sessions" in served.client.get("/metrics").text
    finally:
        served.client.headers |= HEADERS


def test_every_robot_metric_of_the_dashboards_is_published(served: InProcessServer) -> None:
    session = served.opened()
    served.walk(session, 2)
    served.end(session, 2, 0.0)
    drawn = {name for query in run_queries("") for name in metric_names(query.expression)}
    wanted = {name for name in drawn if name.startswith("m3pc_serve_")}
    lines = served.client.get("/metrics").text.splitlines()
    assert len(wanted) == 6
    assert wanted <= {re.split("[{ ]", line)[0] for line in lines}


def test_a_closed_planner_is_not_ready() -> None:
    with in_process() as served:
        served.planner.close()
        response = served.client.get("/readyz")
        assert (response.status_code, response.text) == (503, "the planner does not answer\n")
        assert served.client.get("/livez").status_code == 200


def test_metrics_may_have_a_token_of_their_own() -> None:
    with in_process(metrics_token="for prometheus") as served:
        problem(served.client.get("/metrics"), 401)
        allowed = {"Authorization": "Bearer for prometheus"}
        assert served.client.get("/metrics", headers=allowed).status_code == 200


def test_a_page_of_another_site_is_refused(served: InProcessServer) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        problem(served.client.get("/v1/weights", headers=headers), 403)


def test_without_a_token_only_own_host_names_are_answered() -> None:
    with in_process(token=None) as served:
        assert served.client.get("/v1/weights").status_code == 200
        problem(served.client.get("/v1/weights", headers={"Host": "evil.example:8400"}), 421)


def test_with_the_token_any_host_name_is_answered(served: InProcessServer) -> None:
    own = {"Host": "planner.lab.example"}
    assert served.client.get("/v1/weights", headers=own).status_code == 200
    problem(served.client.get("/metrics", headers=own), 421)


# Weights


def test_weights_are_swapped_and_sessions_go_on(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one", weights(7))
    with in_process(source=path) as served:
        session = served.opened(seed=5)
        assert [answer["version"] for answer in served.walk(session, 2)] == ["0-7", "0-7"]
        write_checkpoint(path, weights(8))
        assert served.client.post("/v1/weights").json()["version"] == "0-8"
        answer = served.act(session, 2, 1.0).json()
        assert answer["version"] == "0-8"
        agent = Agent(Policy(weights(7)))
        agent.reset(seed=5)
        for step in range(2):
            agent.act([step, step + 0.5, -step])
        agent.policy = Policy(weights(8))
        np.testing.assert_allclose(answer["action"], agent.act([2, 2.5, -2]), atol=1e-4)


def test_weights_that_do_not_fit_are_refused_and_the_current_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with in_process(source=path) as served:
        session = served.opened()

        def assert_refused(words: str) -> None:
            assert words in problem(served.client.post("/v1/weights"), 422)["detail"]
            assert served.client.get("/v1/weights").json()["version"] == "0-7"

        assert_refused("is not a checkpoint")
        write_checkpoint(path, weights(8, states=4))
        assert_refused("not taken (shape)")
        write_checkpoint(path, weights(9))
        with_tensors(path, poke(math.nan))
        assert_refused("NaN or Inf")
        (path / "weights.safetensors").write_bytes(b"invalid")
        assert_refused("was changed")
        assert served.act(session, 0).json()["version"] == "0-7"
        counted = served.client.get("/metrics").text
        assert 'm3pc_planner_weights_rejected_total{reason="shape"} 1.0' in counted


def test_weights_of_another_environment_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one", replace(weights(8), env="Other-v1"))
    with in_process(source=path) as served:
        refusal = problem(served.client.post("/v1/weights"), 422)
        assert "trained for Other-v1, not for Pendulum-v1" in refusal["detail"]
        assert served.client.get("/v1/weights").json()["version"] == "0-7"


def modes(served: InProcessServer) -> tuple[list[str], list[str]]:
    """Those that the server offers, and those that its document allows."""
    schema = served.client.get("/openapi.json").json()["components"]["schemas"]["ByReturn"]
    choices = schema["properties"]["mode"]["anyOf"]
    (listed,) = (choice["enum"] for choice in choices if "enum" in choice)
    return served.client.get("/v1/weights").json()["modes"], listed


def test_a_critic_that_was_trained_since_may_guide(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one", weights(8), critic_updates=3)
    with in_process(source=path, critic_trained=False) as served:
        assert all("q" not in names for names in modes(served))
        problem(served.client.post("/v1/sessions", json={"mode": "q"}), 422)
        assert served.client.post("/v1/weights").json()["version"] == "0-8"
        assert all("q" in names for names in modes(served))
        assert served.act(served.opened(mode="q"), 0).status_code == 200


def test_an_untrained_critic_does_not_replace_one_that_is_in_use(
    tmp_path: Path,
) -> None:
    path = write_checkpoint(tmp_path / "one", weights(8), critic_updates=0)
    with in_process(source=path) as served:
        guided = served.opened(mode="q0")
        refusal = problem(served.client.post("/v1/weights"), 422)
        assert "has not learned yet, and 1 open sessions plan by it" in refusal["detail"]
        assert served.client.get("/v1/weights").json()["version"] == "0-7"
        assert all("q" in names for names in modes(served))
        served.client.delete(f"/v1/sessions/{guided}")
        assert served.client.post("/v1/weights").json()["version"] == "0-8"
        assert all("q" not in names for names in modes(served))
    with in_process(source=path, settings=config(planner__mode="q")) as served:
        assert "the server plans by it" in problem(served.client.post("/v1/weights"), 422)["detail"]


def test_a_server_that_follows_a_run_does_not_reload_by_hand(served: InProcessServer) -> None:
    assert "follows a run" in problem(served.client.post("/v1/weights"), 409)["detail"]


# The document and its page


def test_the_document_has_the_sizes_of_the_model(served: InProcessServer) -> None:
    document = served.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    observation = schemas["Step"]["properties"]["observation"]
    assert (observation["minItems"], observation["maxItems"]) == (STATES, STATES)
    limit = schemas["ByReturn"]["properties"]["step_limit"]["anyOf"][0]
    assert (limit["minimum"], limit["maximum"]) == (1, 40)
    action = schemas["ActionResponse"]["properties"]["action"]
    assert (action["minItems"], action["maxItems"]) == (ACTIONS, ACTIONS)
    assert set(document["paths"]) == {
        *("/v1/sessions", "/v1/sessions/{session}", "/v1/sessions/{session}/act"),
        *("/v1/sessions/{session}/end", "/v1/weights", "/livez", "/readyz", "/metrics"),
    }
    for path, method in (("/v1/sessions", "201"), ("/v1/sessions/{session}/act", "200")):
        operation = document["paths"][path]["post"]
        for message in (operation["requestBody"], operation["responses"][method]):
            assert set(message["content"]) == {"application/json", "application/msgpack"}
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(schemas)
    assert "HTTPValidationError" not in text, "FastAPI's own answer to a bad body"


def test_the_page_needs_nothing_from_elsewhere(served: InProcessServer) -> None:
    response = served.client.get("/docs")
    page = response.text
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for word in ("<script", "http://", "https://", "src=", "@import", "url("):
        assert word not in page
    assert "POST /v1/sessions/{session}/act" in page
    assert f"&quot;maxItems&quot;: {STATES}" in page
    assert "Another step is expected" in page


def test_every_answer_forbids_sniffing_and_caching(served: InProcessServer) -> None:
    for path in ("/livez", "/docs", "/v1/weights", "/nowhere"):
        headers = served.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_a_backward_planner_is_refused_as_the_default() -> None:
    policy = Policy(weights(settings=config(planner__mode="goal")))
    with pytest.raises(InputError, match="needs states to reach; serve with"):
        ServiceSpec.from_policy(
            policy, critic_trained=True, deadline=1.0, max_sessions=1, idle_seconds=1.0
        )


def test_a_body_that_arrives_too_slowly_is_refused() -> None:
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the guard lets nothing through")

    async def drip() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    guard = RequestGuard(
        application,
        token=TOKEN,
        metrics_token=None,
        max_body=1000,
        clock=time.monotonic,
        read_seconds=0.05,
    )
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
    scope = {"type": "http", "path": ACT, "method": "POST", "headers": headers}
    asyncio.run(guard(scope, drip, send))
    assert sent[0]["status"] == 408
    assert b"did not arrive within" in sent[1]["body"]
