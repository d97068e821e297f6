"""A real Prometheus beside a real run: everything that is drawn has data, and a death shows."""

import json
import os
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3pc.monitoring.dashboards import OPTIONAL, boards, filled, metric_names, queries
from m3pc.monitoring.services import CONFIG, shipped
from tests.distributed.test_fleet import FLEET, command
from tests.support.runs.online_job import Job, alive, job
from tests.support.runs.small_online import new_run
from tests.support.servers.redis_server import free_port
from tests.support.servers.waiting import eventually

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
PATIENCE = 120.0  # seconds: Ray's metrics are scraped every 15, and a rate needs two


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, expression: str) -> list[dict[str, Any]]:
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{words}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def value(self, expression: str) -> float:
        """Of the one series that there is; 0 where there is none."""
        found = self.ask(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return new_run(tmp_path / "watched", **FLEET).path


@pytest.fixture
def prometheus(run: Path) -> Iterator[Prometheus]:
    """As users start it, before the run."""
    port = free_port()
    told = command("monitor", "up", run, "--port", port)
    assert f"prometheus: http://127.0.0.1:{port}" in told
    pids = [each["pid"] for each in json.loads((run / "monitor" / "processes.json").read_text())]
    assert pids
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        assert "ended: prometheus" in command("monitor", "down", run)
        assert eventually(lambda: not any(map(alive, pids)))


def test_everything_that_is_drawn_has_data_and_a_death_shows(
    run: Path, prometheus: Prometheus
) -> None:
    with job(run) as running:
        running.until_up(2)
        assert "prometheus: http" in command("monitor", "up", run)  # again: it is there already
        running.until(lambda: running.status.get("evaluation"))
        _check_boards(prometheus, run.name)
        _check_rules(prometheus)
        _check_death(running, prometheus, run.name)
        _look(run)
        running.stop()
    # A run that ended is not asked any more: no alert tells that it is away.
    assert list((run / "targets").iterdir()) == []
    assert eventually(lambda: not prometheus.ask('up{job="m3pc"} == 0'), PATIENCE)


def _check_boards(prometheus: Prometheus, run: str) -> None:
    asked = [query for query in queries(shipped(), run) if not query.optional]
    assert len(asked) > 50
    empty = list(asked)

    def all_answer() -> bool:
        empty[:] = [query for query in empty if not prometheus.ask(query.expression)]
        return not empty

    assert eventually(all_answer, PATIENCE), [query.expression for query in empty]


def _check_rules(prometheus: Prometheus) -> None:
    """What rules ask for is there, but for what a healthy run may lack; whether they fire is
    another matter."""
    config = yaml.safe_load((shipped() / CONFIG).read_text())
    files = [path for pattern in config["rule_files"] for path in shipped().glob(pattern)]
    rules = [
        rule
        for path in files
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len(rules) > 20
    names = {name for rule in rules for name in metric_names(rule["expr"])}
    missing = {name for name in names if not name.startswith(tuple(OPTIONAL))}

    def all_there() -> bool:
        missing.difference_update({name for name in missing if prometheus.ask(name)})
        return not missing

    assert eventually(all_there, PATIENCE), missing


def _check_death(running: Job, prometheus: Prometheus, run: str) -> None:
    restarts = f'm3pc_run_restarts_total{{run="{run}",part="actor"}}'
    steps = f'm3pc_actor_env_steps_total{{run="{run}"}}'
    assert prometheus.value(restarts) == 0
    drawn = f"{_panel('Restarts in ten minutes', run)} and on (part) {restarts}"
    assert prometheus.value(drawn) == 0
    before, pid = prometheus.value(steps), running.kill("actor-1")
    assert before > 0
    assert eventually(lambda: prometheus.value(restarts) == 1, PATIENCE)
    assert eventually(lambda: prometheus.value(drawn) > 0, PATIENCE), "the panel shows it"
    running.until_replaced("actor-1", pid)
    assert eventually(
        lambda: prometheus.value(f'm3pc_actor_up{{run="{run}",slot="1"}}') == 1, PATIENCE
    )
    # The count of steps went on: nothing that the dead one did is forgotten.
    assert eventually(lambda: prometheus.value(steps) > before, PATIENCE)
    assert prometheus.value(f"resets({steps}[10m])") == 0


def _panel(title: str, run: str) -> str:
    """What a panel asks for."""
    (panel,) = (
        panel for board in boards(shipped()) for panel in board.panels if panel.title == title
    )
    return filled(panel.queries[0], run, step=15.0).expression


def _look(run: Path) -> None:
    """All dashboards on one page; kept where somebody wants to see it."""
    keep = os.environ.get("M3PC_KEEP_PAGE")
    out = Path(keep) if keep else run / "boards.html"
    assert f"page: {out}" in command("monitor", "page", run, "--out", out, "--minutes", "5")
    assert out.read_text().count("<svg") > 60
