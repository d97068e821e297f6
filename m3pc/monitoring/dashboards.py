"""Reads the shipped dashboards: panels, their places in a grid, their queries.

The files are in Grafana's JSON format, of which M³PC's dashboards use a part.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from m3pc.types import InputError

COLUMNS: Final = 24  # width of a dashboard's grid
SCRAPE_SECONDS: Final = 5.0  # between two scrapes, unless the query sets an interval
KINDS: Final = ("timeseries", "stat", "table", "state-timeline")
# Metrics that a healthy run may lack: start of the name -> reason.
OPTIONAL: Final = {
    "node_": "no node exporter runs",
    "m3pc_run_evaluation_score": "D4RL has no score for the environment",
    "m3pc_serve_": "no server for robots runs",
    "ray_memory_manager_worker_eviction_total": "Ray killed no process for lack of memory",
}
# The dashboards that come first on a page.
ORDER: Final = (
    "overview",
    "data-path",
    "learner-and-policy",
    "hosts-and-ray",
)
_WORDS = frozenset(
    ("and", "or", "unless", "by", "without", "on", "ignoring", "offset", "bool", "inf", "nan")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A PromQL expression of a panel."""

    expression: str
    legend: str  # may contain {{label}}
    instant: bool  # only the last value is requested
    interval: float  # seconds between two scrapes of the metrics

    @property
    def optional(self) -> str:
        """Why the result may be empty in a healthy run; "" if it must not be."""
        names = metric_names(self.expression)
        reasons = (why for start, why in OPTIONAL.items() for n in names if n.startswith(start))
        return next(reasons, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    colour: str
    value: float  # the lower bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The style of series whose names match `pattern`."""

    pattern: re.Pattern[str]
    colour: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardPanel:
    """One chart, number or table of a dashboard, with its place in the grid."""

    title: str
    kind: str
    unit: str
    description: str
    x: int
    y: int
    width: int
    height: int
    queries: tuple[Query, ...]
    minimum: float | None
    maximum: float | None
    decimals: int | None
    thresholds: tuple[Threshold, ...]
    mappings: Mapping[str, tuple[str, str]]  # value -> text, colour
    styles: tuple[Style, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A heading over panels."""

    title: str
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One JSON file of Grafana."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    panels: tuple[DashboardPanel, ...]


def read_dashboards(folder: Path) -> tuple[Dashboard, ...]:
    """All dashboards of a folder of JSON files, or of monitoring/, those in ORDER first."""
    inner = folder / "grafana" / "dashboards"
    files = sorted((inner if inner.is_dir() else folder).glob("*.json"))
    if not files:
        raise InputError(f"no dashboards are in {folder}; give monitoring/grafana/dashboards")
    ranks = {name: rank for rank, name in enumerate(ORDER)}
    return tuple(map(_dashboard, sorted(files, key=lambda path: ranks.get(path.stem, len(ranks)))))


def with_variables(query: Query, run: str, *, step: float) -> Query:
    """Replace Grafana's variables in the query, for points that are `step` seconds apart."""
    window = max(step + query.interval, 4 * query.interval)
    values = {
        "__rate_interval": f"{window:.0f}s",
        "__interval": f"{step:.0f}s",
        "run": _quoted(run),
    }
    expression = re.sub(
        r"\$(?:\{(\w+)\}|(\w+))", lambda at: values[at[1] or at[2]], query.expression
    )
    return replace(query, expression=expression)


def _quoted(text: str) -> str:
    """Escape text for a regular expression between double quotes."""
    plain = re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)
    return json.dumps(plain, ensure_ascii=False)[1:-1]


def metric_names(expression: str) -> set[str]:
    """Names of all series in an expression, with their suffixes `_bucket`, `_sum`, `_count`."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    names = re.findall(r"(?<![\w.:$])([a-zA-Z_:][\w:]*)\b(?!\s*\()", bare)
    return {name for name in names if name.lower() not in _WORDS}


# Reading


def _dashboard(path: Path) -> Dashboard:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        headings = [panel for panel in content["panels"] if panel["type"] == "row"]
        return Dashboard(
            uid=content["uid"],
            title=content["title"],
            description=content["description"],
            rows=tuple(Row(title=row["title"], y=row["gridPos"]["y"]) for row in headings),
            panels=tuple(_panel(panel) for panel in content["panels"] if panel["type"] != "row"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a dashboard of M³PC: {error!r}") from None


def _panel(content: Mapping[str, Any]) -> DashboardPanel:
    if content["type"] not in KINDS:
        raise ValueError(f"a panel of type {content['type']}; there are {', '.join(KINDS)}")
    field, grid = content["fieldConfig"]["defaults"], content["gridPos"]
    return DashboardPanel(
        title=content["title"],
        kind=content["type"],
        unit=field["unit"],
        description=content["description"],
        x=grid["x"],
        y=grid["y"],
        width=grid["w"],
        height=grid["h"],
        queries=tuple(_query(target) for target in content["targets"]),
        minimum=field.get("min"),
        maximum=field.get("max"),
        decimals=field.get("decimals"),
        thresholds=tuple(_thresholds(field["thresholds"]["steps"])),
        mappings=dict(_mappings(field.get("mappings", ()))),
        styles=tuple(map(_style, content["fieldConfig"]["overrides"])),
    )


def _query(content: Mapping[str, Any]) -> Query:
    return Query(
        expression=content["expr"],
        legend=content["legendFormat"],
        instant=bool(content.get("instant", False)),
        interval=float(content.get("interval", f"{SCRAPE_SECONDS}s").removesuffix("s")),
    )


def _thresholds(steps: list[dict[str, Any]]) -> Iterator[Threshold]:
    for step in steps:
        value = float("-inf") if step["value"] is None else float(step["value"])
        yield Threshold(colour=step["color"], value=value)


def _mappings(content: list[dict[str, Any]]) -> Iterator[tuple[str, tuple[str, str]]]:
    for group in content:
        for value, shown in group["options"].items():
            yield value, (shown["text"], shown["color"])


def _style(content: Mapping[str, Any]) -> Style:
    matcher, text = content["matcher"], content["matcher"]["options"]
    pattern = text.strip("/") if matcher["id"] == "byRegexp" else f"^{re.escape(text)}$"
    values = {item["id"]: item["value"] for item in content["properties"]}
    return Style(
        pattern=re.compile(pattern),
        colour=values.get("color", {}).get("fixedColor", ""),
        dashed=values.get("custom.lineStyle", {}).get("fill") == "dash",
    )
