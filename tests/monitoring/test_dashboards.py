"""Dashboards and rules use only metrics that a run exposes, and all of them."""

import json
import re
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3pc.monitoring.dashboards import (
    COLUMNS,
    DashboardPanel,
    Query,
    metric_names,
    read_dashboards,
    with_variables,
)
from m3pc.monitoring.metrics_reference import metrics_table
from m3pc.monitoring.prometheus_api import Prometheus
from m3pc.monitoring.units import UNITS
from m3pc.telemetry.exporter import MAX_SERIES
from m3pc.telemetry.recorder import Metric
from m3pc.types import InputError
from tests.support.servers.pretend_run import DECLARED, PretendRun, pretended
from tests.support.servers.prometheus_server import prometheus, promtool
from tests.support.servers.shipped_monitoring import DASHBOARDS, MONITORING, rules, run_queries
from tests.support.servers.waiting import eventually

FILES = sorted(DASHBOARDS.glob("*.json"))
NAMES = ["data-path", "hosts-and-ray", "learner-and-policy", "overview"]
# Metrics of others: Prometheus itself, its client library, Ray and the node exporter.
FOREIGN = re.compile(
    r"(up|ALERTS|scrape_samples_scraped|m3pc_build_info|(process|ray|node|prometheus)_\w+)"
)
ADDED = {"run", "job", "instance", "le"}  # labels that every metric has, or every histogram
UNUSED: dict[str, str] = {}  # metrics that no dashboard and no rule uses, and why


def content(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text())
    return dashboard


def panels() -> list[DashboardPanel]:
    return [panel for board in read_dashboards(DASHBOARDS) for panel in board.panels]


def expressions() -> dict[str, str]:
    """All expressions of panels and rules, by their places."""
    places = {
        rule["expr"]: name for kind in ("alert", "record") for name, rule in rules(kind).items()
    }
    places |= {query.expression: panel.title for panel in panels() for query in panel.queries}
    return {f"{place}: {expression}": expression for expression, place in places.items()}


# The files


def test_there_are_four_dashboards() -> None:
    assert [path.stem for path in FILES] == NAMES
    assert [board.uid for board in read_dashboards(DASHBOARDS)] == [
        f"m3pc-{name}" for name in ("overview", "data-path", "learner-and-policy", "hosts-and-ray")
    ]
    assert read_dashboards(MONITORING) == read_dashboards(DASHBOARDS)
    with pytest.raises(InputError, match="no dashboards are in"):
        read_dashboards(MONITORING / "rules")


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_dashboards_have_a_fixed_uid_and_two_variables(path: Path) -> None:
    board = content(path)
    assert board["uid"] == f"m3pc-{path.stem}" and "id" not in board
    assert board["schemaVersion"] == 39 and board["tags"] == ["m3pc"]
    source, run = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "DS_PROMETHEUS", "datasource", "prometheus",
    )  # fmt: skip
    assert run["name"] == "run"
    assert run["query"]["query"] == run["definition"] == "label_values(m3pc_build_info, run)"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_panels_have_a_description_and_ask_the_chosen_source(path: Path) -> None:
    chosen = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    entries = content(path)["panels"]
    assert len({panel["id"] for panel in entries}) == len(entries)
    for panel in (panel for panel in entries if panel["type"] != "row"):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        targets = panel["targets"]
        assert panel["datasource"] == chosen and targets, panel["title"]
        assert all(target["datasource"] == chosen for target in targets), panel["title"]
        assert len({target["refId"] for target in targets}) == len(targets), panel["title"]
        assert panel["type"] == "table" or all(target["legendFormat"] for target in targets)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_panels_lie_side_by_side(path: Path) -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in content(path)["panels"]]
    for title, at in places:
        assert at["x"] >= 0 and at["w"] > 0 and at["x"] + at["w"] <= COLUMNS, title
        assert at["y"] >= 0 and at["h"] > 0, title
    for (first, a), (second, b) in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (first, second)


def test_every_query_selects_the_chosen_run_or_the_host() -> None:
    wrong = [
        query.expression
        for panel in panels()
        for query in panel.queries
        for selector in re.findall(r"\{([^}]*)\}", query.expression)
        if '=~"$run' not in selector and 'job="node"' not in selector
    ]
    assert wrong == []


def test_grafana_takes_dashboards_and_prometheus_from_variables() -> None:
    folder = MONITORING / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "${M3PC_PROMETHEUS}")
    scrapes = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert source["jsonData"]["timeInterval"] == scrapes[0]["scrape_interval"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "m3pc.yml").read_text())["providers"]
    assert provider["options"]["path"] == "${M3PC_DASHBOARDS}"


# Their queries


def own() -> dict[str, Metric]:
    """Our metrics by the names of their series."""
    series: dict[str, Metric] = {}
    for metric in DECLARED:
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        series |= {f"{metric.name}{end}": metric for end in ends}
    return series


def test_every_metric_that_is_used_exists() -> None:
    known = set(own()) | set(rules("record"))
    wrong = [
        f"{place}: {name}"
        for place, expression in expressions().items()
        for name in metric_names(expression)
        if name not in known and not FOREIGN.fullmatch(name)
    ]
    assert wrong == []


def test_every_metric_that_exists_is_used() -> None:
    names = {name for expression in expressions().values() for name in metric_names(expression)}
    used = {own()[name].name for name in names if name in own()}
    assert {metric.name for metric in DECLARED} - used == set(UNUSED)


def test_every_recording_rule_is_used() -> None:
    names = {name for expression in expressions().values() for name in metric_names(expression)}
    assert set(rules("record")) - names == set()


def test_labels_and_their_values_exist() -> None:
    """A misspelt label would match no series, and an alert on it would never fire."""
    wrong = []
    for place, expression in expressions().items():
        for name, selector in re.findall(r"(m3pc_\w+)\{([^}]*)\}", expression):
            metric = own().get(name)
            for label, sign, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
                if metric is None or label in ADDED:
                    continue
                values = value.split("|") if "~" in sign else [value]
                if label != metric.label or not set(values) <= set(metric.values):
                    wrong.append(f"{place}: {label}{sign}{value}")
    assert wrong == []


def test_every_query_is_valid_promql(tmp_path: Path) -> None:
    queries = run_queries('a "strange" \\ name.*')
    made = [{"record": f"q:{n}", "expr": query.expression} for n, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": made}]}))
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout


def test_metric_names_of_an_expression() -> None:
    text = """
      histogram_quantile(0.99, sum by (run, le) (rate(a_bucket{stage="total", b=~"x|y"}[5m])))
        / on (run) group_left () clamp_min(run:c:p99_5m, 3) unless on (run) d offset 2h == bool 1
    """
    assert metric_names(text) == {"a_bucket", "run:c:p99_5m", "d"}


def test_variables_are_filled_as_grafana_fills_them() -> None:
    query = Query(
        expression='rate(a{run=~"$run"}[$__rate_interval])', legend="", instant=False, interval=5.0
    )
    assert with_variables(query, "hopper", step=15.0).expression == 'rate(a{run=~"hopper"}[20s])'
    assert with_variables(query, "hopper", step=60.0).expression == 'rate(a{run=~"hopper"}[65s])'
    strange = with_variables(query, 'a.b"}\\', step=15.0).expression
    assert strange == 'rate(a{run=~"a\\\\.b\\"\\\\}\\\\\\\\"}[20s])'


def test_the_list_of_metrics_is_that_of_the_code() -> None:
    written = (MONITORING.parent / "docs" / "METRICS.md").read_text()
    assert written == metrics_table(), "m3pc monitor metrics > docs/METRICS.md"


# Against a real Prometheus


class Watched:
    """A fake run of 64 actors, scraped by a real Prometheus with the shipped rules."""

    def __init__(self, run: PretendRun, url: str) -> None:
        self.run, self.url, self.prometheus = run, url, Prometheus(url)

    def missing(self) -> list[str]:
        """Queries without data."""
        return [
            query.expression
            for query in run_queries("hopper", step=1.0)
            if not self.prometheus.instant(query.expression, time.time())
        ]

    def firing(self) -> set[str]:
        alerts = self.prometheus.alerts()
        return {alert.labels["alertname"] for alert in alerts if alert.state == "firing"}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    run = PretendRun(slots=64)
    with (
        pretended(run) as targets,
        prometheus(tmp_path_factory.mktemp("prometheus"), targets) as url,
    ):
        yield Watched(run, url)


def test_every_query_of_every_dashboard_returns_data(watched: Watched) -> None:
    eventually(lambda: not watched.missing(), patience=60)
    assert watched.missing() == []


def test_legends_name_labels_that_the_series_have(watched: Watched) -> None:
    assert eventually(lambda: not watched.missing(), patience=60)
    wrong = []
    for panel in panels():
        for query in panel.queries:
            expression = with_variables(query, "hopper", step=1.0).expression
            for series in watched.prometheus.instant(expression, time.time()):
                names = re.findall(r"\{\{(\w+)\}\}", query.legend)
                wrong += [f"{panel.title}: {name}" for name in names if name not in series.labels]
    assert wrong == []


def test_a_run_of_64_actors_has_few_series(watched: Watched) -> None:
    def scraped() -> float:
        series = watched.prometheus.instant('scrape_samples_scraped{job="m3pc"}', time.time())
        return series[0].points[0][1] if series else 0.0

    assert eventually(lambda: scraped() > 0, patience=60)
    assert len(own()) + 64 < scraped() <= MAX_SERIES
    dropped = watched.prometheus.instant("m3pc_exporter_dropped_series_total", time.time())
    assert [series.points[0][1] for series in dropped] == [0.0]


def test_internal_metrics_of_ray_are_dropped(watched: Watched) -> None:
    assert eventually(lambda: watched.prometheus.instant("ray_actors", time.time()), patience=60)
    assert watched.prometheus.instant("ray_operation_count_total", time.time()) == []


def test_an_alert_fires_from_end_to_end(watched: Watched) -> None:
    assert eventually(lambda: "Watchdog" in watched.firing(), patience=60)
    assert watched.firing() == {"Watchdog"}
    watched.run.quarantined = 1
    try:
        assert eventually(lambda: "ReplayDamaged" in watched.firing(), patience=60)
        (alert,) = [
            firing
            for firing in watched.prometheus.alerts()
            if firing.labels["alertname"] == "ReplayDamaged"
        ]
        assert alert.labels["run"] == "hopper" and alert.labels["severity"] == "critical"
        assert "run hopper" in alert.annotations["description"]
    finally:
        watched.run.quarantined = 0
    assert eventually(lambda: "ReplayDamaged" not in watched.firing(), patience=60)
