"""Metrics over HTTP: what is told, to whom, and how little it costs to ask badly."""

import http.client
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from m3pc.core import http_server
from m3pc.telemetry.aggregate import RunTotals
from m3pc.telemetry.catalogue import (
    ACTOR_UP,
    APPENDS,
    BATCH_ROWS,
    DROPPED_SERIES,
    ENV_STEPS,
    PARTS_UP,
    PLAN_SECONDS,
    QUEUE_ROWS,
)
from m3pc.telemetry.exporter import MOST_SERIES, PORT, Exporter
from m3pc.telemetry.recorder import METRICS, MOST_SLOTS, Recorder, Snapshot, merged
from tests.support.servers.redis_server import free_port
from tests.support.servers.waiting import eventually

INFO = {"version": "1", "ray": "2", "auth": "token"}


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(port=free_port(), info=INFO) as found:
        yield found


def asked(
    exporter: Exporter, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(exporter.address, timeout=10)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def series(exporter: Exporter) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    status, text = asked(exporter)
    assert status == 200
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def number(exporter: Exporter, name: str, **labels: str) -> float | None:
    return series(exporter).get((name, tuple(labels.items())))


def test_what_was_recorded_is_told(exporter: Exporter) -> None:
    recorder = Recorder()
    recorder.add(ENV_STEPS, 7)
    recorder.add(APPENDS, 2, "retry later")
    recorder.set(QUEUE_ROWS, 3)
    for size in (1, 2, 2, 5000):
        recorder.observe(BATCH_ROWS, size)
    recorder.observe(PLAN_SECONDS, 0.25, "queue")
    exporter.update(recorder.snapshot())
    found = series(exporter)
    assert found["m3pc_actor_env_steps_total", ()] == 7
    assert found["m3pc_replay_append_total", (("result", "retry later"),)] == 2
    assert found["m3pc_planner_queue_depth", ()] == 3
    assert found["m3pc_planner_batch_size_bucket", (("le", "1.0"),)] == 1
    assert found["m3pc_planner_batch_size_bucket", (("le", "2.0"),)] == 3
    assert found["m3pc_planner_batch_size_bucket", (("le", "1024.0"),)] == 3
    assert found["m3pc_planner_batch_size_bucket", (("le", "+Inf"),)] == 4
    assert found["m3pc_planner_batch_size_sum", ()] == 5005
    durations = "m3pc_planner_request_duration_seconds_count"
    assert found[durations, (("stage", "queue"),)] == 1
    assert found[durations, (("stage", "total"),)] == 0


def test_counts_are_told_from_0_and_gauges_once_they_are_known(exporter: Exporter) -> None:
    """A rate needs a first value; a gauge that nobody set has none."""
    found = series(exporter)
    names = {name for name, _ in found}
    for metric in METRICS.values():
        end = {"counter": "", "gauge": "", "histogram": "_count"}[metric.kind]
        assert (metric.name + end in names) == (metric.kind != "gauge"), metric.name
    for result in APPENDS.values:
        assert found["m3pc_replay_append_total", (("result", result),)] == 0


def test_versions_are_told(exporter: Exporter) -> None:
    assert series(exporter)["m3pc_build_info", tuple(sorted(INFO.items()))] == 1


def test_a_count_does_not_go_backwards_when_an_actor_is_replaced(exporter: Exporter) -> None:
    totals, first, second = RunTotals(), Recorder(), Recorder()
    first.add(ENV_STEPS, 100)
    totals.take("actor-0", 1, first.snapshot())
    exporter.update(totals.now())
    assert number(exporter, "m3pc_actor_env_steps_total") == 100
    second.add(ENV_STEPS, 1)
    totals.take("actor-0", 2, second.snapshot())
    exporter.update(totals.now())
    assert number(exporter, "m3pc_actor_env_steps_total") == 101


def fleet(actors: int) -> Snapshot:
    """As a driver of so many actors tells it, each metric of theirs recorded by each."""
    reports = []
    for _ in range(actors):
        recorder = Recorder()
        for metric in METRICS.values():
            for label in metric.values or ("",):
                if metric.kind == "counter":
                    recorder.add(metric, 1.0, label)
                elif metric.kind == "histogram":
                    recorder.observe(metric, 1.0, label)
                elif metric is not ACTOR_UP:
                    recorder.set(metric, 1.0, label)
        reports.append(recorder.snapshot())
    slots = {ACTOR_UP.name: {str(slot): [1.0] for slot in range(actors)}}
    return merged([*reports, slots])


def test_64_actors_make_fewer_than_1500_series(exporter: Exporter) -> None:
    exporter.update(fleet(64))
    found = series(exporter)
    assert len(found) <= 1500
    assert sum(name == "m3pc_actor_up" for name, _ in found) == 64
    assert found["m3pc_actor_env_steps_total", ()] == 64
    assert found[DROPPED_SERIES.name, ()] == 0


def test_a_thousand_actors_are_told_by_their_sum(exporter: Exporter) -> None:
    exporter.update(merged([fleet(1), {ACTOR_UP.name: {str(n): [1.0] for n in range(1000)}}]))
    found = series(exporter)
    assert sum(name == "m3pc_actor_up" for name, _ in found) == MOST_SLOTS
    assert ("m3pc_run_part_up", (("part", "actor"),)) in found


def test_what_is_too_much_is_left_out_and_counted(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m3pc.telemetry.exporter.MOST_SERIES", 50)
    exporter.update(fleet(40))
    found = series(exporter)
    ours = [name for name, _ in found if name.startswith("m3pc_")]
    assert len(ours) <= 50 + len(INFO) + 1
    assert found[DROPPED_SERIES.name, ()] > 0
    assert MOST_SERIES == 1500


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say(exporter: Exporter) -> None:
    exporter.update(fleet(2))
    text = asked(exporter)[1]
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_health_and_readiness_differ(exporter: Exporter) -> None:
    assert asked(exporter, "/healthz") == (200, "alive\n")
    assert asked(exporter, "/readyz") == (503, "nothing was told yet\n")
    exporter.update({}, unready="away: learner")
    assert asked(exporter, "/readyz") == (503, "away: learner\n")
    exporter.update({})
    assert asked(exporter, "/readyz") == (200, "ready\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/../etc/passwd", "/metricsx", "/admin"])
def test_nothing_else_is_there(exporter: Exporter, path: str) -> None:
    assert asked(exporter, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_can_be_done(exporter: Exporter, method: str) -> None:
    assert asked(exporter, "/metrics", method)[0] == 405


def test_a_name_that_a_stranger_may_own_is_refused(exporter: Exporter) -> None:
    """DNS rebinding: the name of a stranger's page leads to 127.0.0.1."""
    for host in ("evil.example", "evil.example:9400", "127.0.0.1.evil.example", "", "a b"):
        assert asked(exporter, Host=host)[0] == 421, host
    for host in ("127.0.0.1", "127.0.0.1:9400", "localhost", "[::1]:9400", socket.gethostname()):
        assert asked(exporter, Host=host)[0] == 200, host


def test_a_page_of_another_site_is_refused(exporter: Exporter) -> None:
    assert asked(exporter, Origin="http://evil.example")[0] == 403
    assert asked(exporter, Sec_Fetch_Site="cross-site")[0] == 403


def test_with_a_token_only_its_holders_see_metrics() -> None:
    with Exporter(port=free_port(), token="s3cret") as exporter:
        assert asked(exporter)[0] == 401
        assert asked(exporter, Authorization="Bearer wrong")[0] == 401
        assert asked(exporter, Authorization="Bearer é")[0] == 401
        assert asked(exporter, Authorization="Bearer s3cret")[0] == 200
        assert asked(exporter, "/healthz")[0] == 200


def test_several_runs_find_a_port_each_and_a_given_one_is_not_shared() -> None:
    with ExitStack() as stack:
        first, second = stack.enter_context(Exporter()), stack.enter_context(Exporter())
        ports = [int(each.address.rpartition(":")[2]) for each in (first, second)]
        assert len(set(ports)) == 2 and min(ports) >= PORT
        with pytest.raises(OSError, match=f"no metrics can be served at 127.0.0.1:{ports[0]}"):
            Exporter(port=ports[0])


def test_whoever_says_nothing_is_let_go_and_others_are_served(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 1.0)
    host, _, port = exporter.address.rpartition(":")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)
        ]
        for each in silent[:8]:
            each.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert eventually(lambda: _is_served(exporter))


def _is_served(exporter: Exporter) -> bool:
    try:
        return asked(exporter)[0] == 200
    except (OSError, http.client.HTTPException):  # no room
        return False


def test_a_drip_of_bytes_does_not_hold_a_place(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, all of them never."""
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 1.0)
    host, _, port = exporter.address.rpartition(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.settimeout(10)
        sent = 0
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                slow.sendall(b"X")
                sent += 1
            except OSError:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"it took {sent} bytes")


@given(st.binary(min_size=1, max_size=300))
def test_bytes_that_are_no_request_end_nothing(served: Exporter, noise: bytes) -> None:
    host, _, port = served.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(noise + b"\r\n\r\n")
        stranger.shutdown(socket.SHUT_WR)
        while True:
            try:
                if not stranger.recv(65536):
                    break
            except ConnectionResetError:
                break
    assert eventually(lambda: _is_served(served))


@pytest.fixture(scope="module")
def served() -> Iterator[Exporter]:
    with Exporter(port=free_port()) as found:
        yield found


@given(st.text(max_size=50))
def test_a_label_is_told_as_it_is_whatever_it_holds(served: Exporter, text: str) -> None:
    """Labels come from closed sets; were one to slip through, it could not break the format."""
    served.update({ACTOR_UP.name: {text: [1.0]}, PARTS_UP.name: {text: [1.0]}})
    _, told = asked(served)
    names = {
        sample.name for family in text_string_to_metric_families(told) for sample in family.samples
    }
    assert "m3pc_actor_up" in names
    assert all(name.startswith(("m3pc_", "process_")) for name in names)
    assert ("m3pc_run_part_up" in names) == (text in PARTS_UP.values)
