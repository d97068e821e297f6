"""Metrics over HTTP: what is published, to whom, and how little a bad request costs."""

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
from m3pc.telemetry.exporter import MAX_SERIES, PORT, Exporter
from m3pc.telemetry.recorder import MAX_SLOTS, METRICS, Recorder, Snapshot, merge
from tests.support.servers.redis_server import free_port
from tests.support.servers.waiting import eventually

INFO = {"version": "1", "ray": "2", "auth": "token"}


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(port=free_port(), info=INFO) as started:
        yield started


def get(
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
    status, text = get(exporter)
    assert status == 200
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    return series(exporter).get((name, tuple(labels.items())))


def test_recorded_metrics_are_published(exporter: Exporter) -> None:
    recorder = Recorder()
    recorder.add(ENV_STEPS, 7)
    recorder.add(APPENDS, 2, "retry later")
    recorder.set(QUEUE_ROWS, 3)
    for size in (1, 2, 2, 5000):
        recorder.observe(BATCH_ROWS, size)
    recorder.observe(PLAN_SECONDS, 0.25, "queue")
    exporter.update(recorder.snapshot())
    samples = series(exporter)
    assert samples["m3pc_actor_env_steps_total", ()] == 7
    assert samples["m3pc_replay_append_total", (("result", "retry later"),)] == 2
    assert samples["m3pc_planner_queue_depth", ()] == 3
    assert samples["m3pc_planner_batch_size_bucket", (("le", "1.0"),)] == 1
    assert samples["m3pc_planner_batch_size_bucket", (("le", "2.0"),)] == 3
    assert samples["m3pc_planner_batch_size_bucket", (("le", "1024.0"),)] == 3
    assert samples["m3pc_planner_batch_size_bucket", (("le", "+Inf"),)] == 4
    assert samples["m3pc_planner_batch_size_sum", ()] == 5005
    durations = "m3pc_planner_request_duration_seconds_count"
    assert samples[durations, (("stage", "queue"),)] == 1
    assert samples[durations, (("stage", "total"),)] == 0


def test_counters_start_at_0_and_gauges_appear_once_they_are_set(exporter: Exporter) -> None:
    """A rate needs a first value; an unset gauge has none."""
    samples = series(exporter)
    names = {name for name, _ in samples}
    for metric in METRICS.values():
        end = {"counter": "", "gauge": "", "histogram": "_count"}[metric.kind]
        assert (metric.name + end in names) == (metric.kind != "gauge"), metric.name
    for result in APPENDS.values:
        assert samples["m3pc_replay_append_total", (("result", result),)] == 0


def test_versions_are_published(exporter: Exporter) -> None:
    assert series(exporter)["m3pc_build_info", tuple(sorted(INFO.items()))] == 1


def test_a_count_does_not_go_backwards_when_an_actor_is_replaced(exporter: Exporter) -> None:
    totals, first, second = RunTotals(), Recorder(), Recorder()
    first.add(ENV_STEPS, 100)
    totals.update("actor-0", 1, first.snapshot())
    exporter.update(totals.snapshot())
    assert value(exporter, "m3pc_actor_env_steps_total") == 100
    second.add(ENV_STEPS, 1)
    totals.update("actor-0", 2, second.snapshot())
    exporter.update(totals.snapshot())
    assert value(exporter, "m3pc_actor_env_steps_total") == 101


def fleet(actors: int) -> Snapshot:
    """What a driver publishes of so many actors, each of which records every metric."""
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
    return merge([*reports, slots])


def test_64_actors_make_fewer_than_1500_series(exporter: Exporter) -> None:
    exporter.update(fleet(64))
    samples = series(exporter)
    assert len(samples) <= 1500
    assert sum(name == "m3pc_actor_up" for name, _ in samples) == 64
    assert samples["m3pc_actor_env_steps_total", ()] == 64
    assert samples[DROPPED_SERIES.name, ()] == 0


def test_a_thousand_actors_are_published_as_sums(exporter: Exporter) -> None:
    exporter.update(merge([fleet(1), {ACTOR_UP.name: {str(n): [1.0] for n in range(1000)}}]))
    samples = series(exporter)
    assert sum(name == "m3pc_actor_up" for name, _ in samples) == MAX_SLOTS
    assert ("m3pc_run_part_up", (("part", "actor"),)) in samples


def test_series_beyond_the_limit_are_left_out_and_counted() -> None:
    with Exporter(port=free_port(), info=INFO, max_series=50) as exporter:
        exporter.update(fleet(40))
        samples = series(exporter)
    ours = [name for name, _ in samples if name.startswith("m3pc_")]
    assert len(ours) <= 50 + len(INFO) + 1
    assert samples[DROPPED_SERIES.name, ()] > 0
    assert MAX_SERIES == 1500


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_reports_nothing(exporter: Exporter) -> None:
    exporter.update(fleet(2))
    text = get(exporter)[1]
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_health_and_readiness_differ(exporter: Exporter) -> None:
    assert get(exporter, "/healthz") == (200, "alive\n")
    assert get(exporter, "/readyz") == (503, "no metrics have been published yet\n")
    exporter.update({}, unready="away: learner")
    assert get(exporter, "/readyz") == (503, "away: learner\n")
    exporter.update({})
    assert get(exporter, "/readyz") == (200, "ready\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/../etc/passwd", "/metricsx", "/admin"])
def test_other_paths_are_not_found(exporter: Exporter, path: str) -> None:
    assert get(exporter, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_other_methods_are_refused(exporter: Exporter, method: str) -> None:
    assert get(exporter, "/metrics", method)[0] == 405


def test_a_host_name_that_another_site_may_own_is_refused(exporter: Exporter) -> None:
    """DNS rebinding: the name of a foreign page resolves to 127.0.0.1."""
    for host in ("evil.example", "evil.example:9400", "127.0.0.1.evil.example", "", "a b"):
        assert get(exporter, Host=host)[0] == 421, host
    for host in ("127.0.0.1", "127.0.0.1:9400", "localhost", "[::1]:9400", socket.gethostname()):
        assert get(exporter, Host=host)[0] == 200, host


def test_a_page_of_another_site_is_refused(exporter: Exporter) -> None:
    assert get(exporter, Origin="http://evil.example")[0] == 403
    assert get(exporter, Sec_Fetch_Site="cross-site")[0] == 403


def test_with_a_token_only_its_holders_see_metrics() -> None:
    with Exporter(port=free_port(), token="s3cret") as exporter:
        assert get(exporter)[0] == 401
        assert get(exporter, Authorization="Bearer wrong")[0] == 401
        assert get(exporter, Authorization="Bearer é")[0] == 401
        assert get(exporter, Authorization="Bearer s3cret")[0] == 200
        assert get(exporter, "/healthz")[0] == 200


def test_several_runs_find_a_port_each_and_a_requested_one_is_not_shared() -> None:
    with ExitStack() as stack:
        first, second = stack.enter_context(Exporter()), stack.enter_context(Exporter())
        ports = [int(exporter.address.rpartition(":")[2]) for exporter in (first, second)]
        assert len(set(ports)) == 2 and min(ports) >= PORT
        with pytest.raises(OSError, match=f"no metrics can be served at 127.0.0.1:{ports[0]}"):
            Exporter(port=ports[0])


@pytest.fixture
def impatient() -> Iterator[Exporter]:
    with Exporter(port=free_port(), connection_seconds=1.0) as started:
        yield started


def connected(exporter: Exporter) -> socket.socket:
    host, _, port = exporter.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def is_served(exporter: Exporter) -> bool:
    try:
        return get(exporter)[0] == 200
    except (OSError, http.client.HTTPException):  # no room
        return False


def test_silent_connections_are_closed_and_others_are_served(impatient: Exporter) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(impatient)) for _ in range(200)]
        for link in silent[:8]:
            link.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert not is_served(impatient), "there is no room yet"
        assert eventually(lambda: is_served(impatient))


def test_a_client_that_reads_nothing_is_cut_off(impatient: Exporter) -> None:
    """Its request is complete; the answers to many of them fill every buffer on the way."""
    with connected(impatient) as greedy:
        request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        until = time.monotonic() + 30
        with pytest.raises(OSError):
            while time.monotonic() < until:
                greedy.sendall(request)
                time.sleep(0.05)


def test_a_drip_of_bytes_does_not_hold_a_connection(impatient: Exporter) -> None:
    """Each byte comes in time, all of them never do."""
    with connected(impatient) as slow:
        sent, until = 0, time.monotonic() + 30
        while time.monotonic() < until:
            try:
                slow.sendall(b"X")
                sent += 1
            except OSError:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"it took {sent} bytes")


@given(st.binary(min_size=1, max_size=300))
def test_bytes_that_are_no_request_do_not_stop_the_server(served: Exporter, noise: bytes) -> None:
    with connected(served) as client:
        client.sendall(noise + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        while True:
            try:
                if not client.recv(65536):
                    break
            except ConnectionResetError:
                break
    assert eventually(lambda: is_served(served))


@pytest.fixture(scope="module")
def served() -> Iterator[Exporter]:
    with Exporter(port=free_port()) as started:
        yield started


@given(st.text(max_size=50))
def test_a_label_may_hold_any_text(served: Exporter, text: str) -> None:
    """Labels come from closed sets; were one to slip through, it could not break the format."""
    served.update({ACTOR_UP.name: {text: [1.0]}, PARTS_UP.name: {text: [1.0]}})
    _, page = get(served)
    names = {
        sample.name for family in text_string_to_metric_families(page) for sample in family.samples
    }
    assert "m3pc_actor_up" in names
    assert all(name.startswith(("m3pc_", "process_")) for name in names)
    assert ("m3pc_run_part_up" in names) == (text in PARTS_UP.values)
