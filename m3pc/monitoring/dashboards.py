"""The dashboards that are shipped, as plain records: panels, where they stand, what they ask.

The JSON files are Grafana's; of all that Grafana knows, this reads what M³PC's own use.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from m3pc.types import InputError

COLUMNS: Final = 24  # of a board's grid
SCRAPE_SECONDS: Final = 5.0  # between two looks at a run; boards say where it is more
KINDS: Final = ("timeseries", "stat", "table", "state-timeline")
# What a healthy run may lack, and why.
OPTIONAL: Final = {
    "node_": "no node exporter runs",
    "m3pc_run_evaluation_score": "D4RL has no score for the environment",
    "m3pc_serve_": "nothing is served to robots",
    "ray_memory_manager_worker_eviction_total": "Ray killed nothing for memory",
}
ORDER: Final = ("overview", "data-path", "learner-and-policy", "hosts-and-ray")  # others after them
_WORDS = frozenset(
    ("and", "or", "unless", "by", "without", "on", "ignoring", "offset", "bool", "inf", "nan")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    expression: str
    legend: str  # with {{label}} in it
    instant: bool  # only the last value counts
    interval: float  # seconds between two looks at what it asks for

    @property
    def optional(self) -> str:
        """Why it may find nothing in a healthy run; "" where it may not."""
        names = metric_names(self.expression)
        found = [why for start, why in OPTIONAL.items() if any(n.startswith(start) for n in names)]
        return found[0] if found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    colour: str
    value: float  # from here on


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Of the series whose names match."""

    pattern: re.Pattern[str]
    colour: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardPanel:
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
    mappings: Mapping[str, tuple[str, str]]  # text and colour of a value
    styles: tuple[Style, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A heading."""

    title: str
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    panels: tuple[DashboardPanel, ...]


def boards(folder: Path) -> tuple[Board, ...]:
    """All dashboards of a folder, or of monitoring/ itself, as they are best read."""
    inner = folder / "grafana" / "dashboards"
    files = sorted((inner if inner.is_dir() else folder).glob("*.json"))
    if not files:
        raise InputError(f"no dashboards are in {folder}; give monitoring/grafana/dashboards")
    places = {name: number for number, name in enumerate(ORDER)}
    return tuple(map(_board, sorted(files, key=lambda path: places.get(path.stem, len(places)))))


def queries(folder: Path, run: str, *, step: float = 15.0) -> list[Query]:
    """Every query of every panel as Grafana would send it for a run; none is twice."""
    found: dict[str, Query] = {}
    for board in boards(folder):
        for panel in board.panels:
            for query in panel.queries:
                made = filled(query, run, step=step)
                found.setdefault(made.expression, made)
    return list(found.values())


def filled(query: Query, run: str, *, step: float) -> Query:
    """With Grafana's variables replaced, for answers that are `step` seconds apart."""
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
    """For a regular expression between double quotes: it stands for itself."""
    plain = re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)
    return json.dumps(plain, ensure_ascii=False)[1:-1]


def metric_names(expression: str) -> set[str]:
    """Of series that an expression asks for, `_bucket`, `_sum` and `_count` included."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    found = re.findall(r"(?<![\w.:$])([a-zA-Z_:][\w:]*)\b(?!\s*\()", bare)
    return {name for name in found if name.lower() not in _WORDS}


# Reading


def _board(path: Path) -> Board:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        headings = [panel for panel in told["panels"] if panel["type"] == "row"]
        return Board(
            uid=told["uid"],
            title=told["title"],
            description=told["description"],
            rows=tuple(Row(title=row["title"], y=row["gridPos"]["y"]) for row in headings),
            panels=tuple(_panel(panel) for panel in told["panels"] if panel["type"] != "row"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a dashboard of M³PC: {error!r}") from None


def _panel(told: Mapping[str, Any]) -> DashboardPanel:
    if told["type"] not in KINDS:
        raise ValueError(f"a panel of type {told['type']}; there are {', '.join(KINDS)}")
    field, place = told["fieldConfig"]["defaults"], told["gridPos"]
    return DashboardPanel(
        title=told["title"],
        kind=told["type"],
        unit=field["unit"],
        description=told["description"],
        x=place["x"],
        y=place["y"],
        width=place["w"],
        height=place["h"],
        queries=tuple(_query(target) for target in told["targets"]),
        minimum=field.get("min"),
        maximum=field.get("max"),
        decimals=field.get("decimals"),
        thresholds=tuple(_thresholds(field["thresholds"]["steps"])),
        mappings=dict(_mappings(field.get("mappings", ()))),
        styles=tuple(_style(each) for each in told["fieldConfig"]["overrides"]),
    )


def _query(told: Mapping[str, Any]) -> Query:
    return Query(
        expression=told["expr"],
        legend=told["legendFormat"],
        instant=bool(told.get("instant", False)),
        interval=float(told.get("interval", f"{SCRAPE_SECONDS}s").removesuffix("s")),
    )


def _thresholds(steps: list[dict[str, Any]]) -> Iterator[Threshold]:
    for step in steps:
        value = float("-inf") if step["value"] is None else float(step["value"])
        yield Threshold(colour=step["color"], value=value)


def _mappings(told: list[dict[str, Any]]) -> Iterator[tuple[str, tuple[str, str]]]:
    for group in told:
        for value, shown in group["options"].items():
            yield value, (shown["text"], shown["color"])


def _style(told: Mapping[str, Any]) -> Style:
    matcher, text = told["matcher"], told["matcher"]["options"]
    pattern = text.strip("/") if matcher["id"] == "byRegexp" else f"^{re.escape(text)}$"
    values = {each["id"]: each["value"] for each in told["properties"]}
    return Style(
        pattern=re.compile(pattern),
        colour=values.get("color", {}).get("fixedColor", ""),
        dashed=values.get("custom.lineStyle", {}).get("fill") == "dash",
    )
