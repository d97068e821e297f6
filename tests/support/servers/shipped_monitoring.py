"""The rules and dashboards that are shipped in monitoring/, as records."""

from pathlib import Path
from typing import Any

import yaml

from m3pc.monitoring.dashboards import Query, read_dashboards, with_variables

MONITORING = Path(__file__).resolve().parents[3] / "monitoring"
RULES = MONITORING / "rules"
DASHBOARDS = MONITORING / "grafana" / "dashboards"


def rules(kind: str) -> dict[str, Any]:
    """By name: those with "alert", or with "record"."""
    by_name: dict[str, Any] = {}
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if kind in rule:
                    assert rule[kind] not in by_name, rule[kind]
                    by_name[rule[kind]] = rule
    return by_name


def run_queries(run: str, *, step: float = 15.0) -> list[Query]:
    """The queries of all panels as Grafana would send them for a run, without repetitions."""
    by_expression: dict[str, Query] = {}
    for dashboard in read_dashboards(DASHBOARDS):
        for panel in dashboard.panels:
            for query in panel.queries:
                filled = with_variables(query, run, step=step)
                by_expression.setdefault(filled.expression, filled)
    return list(by_expression.values())
