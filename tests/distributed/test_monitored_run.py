"""A real Prometheus beside a real run: every panel has data, and the death of an actor shows."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from m3pc.monitoring.dashboards import OPTIONAL, metric_names, read_dashboards, with_variables
from m3pc.monitoring.prometheus_api import Prometheus, Series
from m3pc.monitoring.services import shipped_folder
from tests.support.runs.fleet_runs import FLEET, command
from tests.support.runs.online_job import Job, alive, job
from tests.support.runs.small_online import new_run
from tests.support.servers.redis_server import free_port
from tests.support.servers.shipped_monitoring import rules, run_queries
from tests.support.servers.waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
PATIENCE = 120.0  # seconds: Ray's metrics are scraped every 15, and a rate needs two samples


def ask(prometheus: Prometheus, expression: str) -> list[Series]:
    return prometheus.instant(expression, time.time())


def value(prometheus: Prometheus, expression: str) -> float:
    """Of the only series; 0 if there is none."""
    series = ask(prometheus, expression)
    assert len(series) <= 1, series
    return series[0].points[0][1] if series else 0.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return new_run(tmp_path / "watched", **FLEET).path


@pytest.fixture
def prometheus(run: Path) -> Iterator[Prometheus]:
    """As users start it, before the run."""
    port = free_port()
    output = command("monitor", "up", run, "--port", port)
    assert f"prometheus: http://127.0.0.1:{port}" in output
    entries = json.loads((run / "monitor" / "processes.json").read_text())
    pids = [entry["pid"] for entry in entries]
    assert pids
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        assert "ended: prometheus" in command("monitor", "down", run)
        assert eventually(lambda: not any(map(alive, pids)))


def test_every_panel_of_a_run_has_data_and_a_death_shows(run: Path, prometheus: Prometheus) -> None:
    with job(run) as work:
        work.until_up(2)
        assert "prometheus: http" in command("monitor", "up", run)  # again: it runs already
        work.until(lambda: work.status.get("evaluation"))
        _check_dashboards(prometheus, run.name)
        _check_rules(prometheus)
        _check_death(work, prometheus, run.name)
        _check_page(run)
        work.stop()
    # A run that ended is not scraped any more: no alert says that it is away.
    assert list((run / "targets").iterdir()) == []
    assert eventually(lambda: not ask(prometheus, 'up{job="m3pc"} == 0'), PATIENCE)


def _check_dashboards(prometheus: Prometheus, run: str) -> None:
    empty = [query for query in run_queries(run) if not query.optional]
    assert len(empty) > 50

    def all_have_data() -> bool:
        empty[:] = [query for query in empty if not ask(prometheus, query.expression)]
        return not empty

    assert eventually(all_have_data, PATIENCE), [query.expression for query in empty]


def _check_rules(prometheus: Prometheus) -> None:
    """All metrics of the rules exist, but for those that a healthy run may lack."""
    expressions = [rule["expr"] for kind in ("alert", "record") for rule in rules(kind).values()]
    assert len(expressions) > 20
    names = {name for expression in expressions for name in metric_names(expression)}
    missing = {name for name in names if not name.startswith(tuple(OPTIONAL))}

    def all_exist() -> bool:
        missing.difference_update({name for name in missing if ask(prometheus, name)})
        return not missing

    assert eventually(all_exist, PATIENCE), missing


def _check_death(work: Job, prometheus: Prometheus, run: str) -> None:
    restarts = f'm3pc_run_restarts_total{{run="{run}",part="actor"}}'
    steps = f'm3pc_actor_env_steps_total{{run="{run}"}}'
    assert value(prometheus, restarts) == 0
    drawn = f"{_expression('Restarts in ten minutes', run)} and on (part) {restarts}"
    assert value(prometheus, drawn) == 0
    before, pid = value(prometheus, steps), work.kill("actor-1")
    assert before > 0
    assert eventually(lambda: value(prometheus, restarts) == 1, PATIENCE)
    assert eventually(lambda: value(prometheus, drawn) > 0, PATIENCE), "the panel shows it"
    work.until_replaced("actor-1", pid)
    is_up = f'm3pc_actor_up{{run="{run}",slot="1"}}'
    assert eventually(lambda: value(prometheus, is_up) == 1, PATIENCE)
    # The count of steps goes on: the steps of the dead process stay in it.
    assert eventually(lambda: value(prometheus, steps) > before, PATIENCE)
    assert value(prometheus, f"resets({steps}[10m])") == 0


def _expression(title: str, run: str) -> str:
    """The first query of a panel."""
    (panel,) = (
        panel
        for dashboard in read_dashboards(shipped_folder())
        for panel in dashboard.panels
        if panel.title == title
    )
    return with_variables(panel.queries[0], run, step=15.0).expression


def _check_page(run: Path) -> None:
    """All dashboards are on one page. M3PC_KEEP_PAGE names a file that keeps it."""
    keep = os.environ.get("M3PC_KEEP_PAGE")
    out = Path(keep) if keep else run / "boards.html"
    assert f"page: {out}" in command("monitor", "page", run, "--out", out, "--minutes", "5")
    assert out.read_text().count("<svg") > 60
