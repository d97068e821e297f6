"""A real Prometheus beside a real run: everything that is drawn has data, and a death shows."""

import json
import os
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3pc.run.monitor.boards import OPTIONAL, metric_names, queries
from m3pc.run.monitor.watch import CONFIG, shipped
from tests.online_job import Job, alive, job
from tests.redis_server import free_port
from tests.shared_data import ROOT
from tests.small_online import new_run
from tests.waiting import eventually

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
PATIENCE = 120.0  # seconds: Ray's metrics are scraped every 15, and a rate needs two


def m3pc(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "m3pc", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    return new_run(
        tmp_path / "watched",
        online__steps=10**6,
        online__publish_every=5,
        online__checkpoint_every=20,
        evaluation__every=300,
        fleet__actors=2,
        fleet__receipts=True,
    ).path


@pytest.fixture
def prometheus(run: Path) -> Iterator[Prometheus]:
    """As users start it, before the run."""
    port = free_port()
    told = m3pc("monitor", "up", run, "--port", port)
    assert f"prometheus: http://127.0.0.1:{port}" in told
    pids = [each["pid"] for each in json.loads((run / "monitor" / "processes.json").read_text())]
    assert pids
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        assert "ended: prometheus" in m3pc("monitor", "down", run)
        assert eventually(lambda: not any(map(alive, pids)))


def test_everything_that_is_drawn_has_data_and_a_death_shows(
    run: Path, prometheus: Prometheus
) -> None:
    with job(run) as running:
        running.until_up(2)
        assert "prometheus: http" in m3pc("monitor", "up", run)  # again: it is there already
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
    before, pid = prometheus.value(steps), running.kill("actor-1")
    assert before > 0
    assert eventually(lambda: prometheus.value(restarts) == 1, PATIENCE)
    running.until_replaced("actor-1", pid)
    assert eventually(
        lambda: prometheus.value(f'm3pc_actor_up{{run="{run}",slot="1"}}') == 1, PATIENCE
    )
    # The count of steps went on: nothing that the dead one did is forgotten.
    assert eventually(lambda: prometheus.value(steps) > before, PATIENCE)
    assert prometheus.value(f"resets({steps}[10m])") == 0


def _look(run: Path) -> None:
    """All dashboards on one page; kept where somebody wants to see it."""
    keep = os.environ.get("M3PC_KEEP_PAGE")
    out = Path(keep) if keep else run / "boards.html"
    assert f"page: {out}" in m3pc("monitor", "page", run, "--out", out, "--minutes", "5")
    text = out.read_text()
    assert "no data" not in text.lower() or "node" in text
    assert text.count("<svg") > 20
