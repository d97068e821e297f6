"""Draws a run's dashboards as one self-contained HTML page, for machines without Grafana."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from m3pc.monitoring.charts import (
    MAX_LANES,
    Line,
    PlotArea,
    coloured_lines,
    line_chart,
    threshold_colour,
    timeline,
    timeline_height,
)
from m3pc.monitoring.dashboards import (
    COLUMNS,
    Dashboard,
    DashboardPanel,
    Query,
    read_dashboards,
    with_variables,
)
from m3pc.monitoring.prometheus_api import Alert, MetricsSource, Prometheus, Series
from m3pc.monitoring.units import format_value
from m3pc.types import InputError

POINTS = 240  # per line
MIN_SPAN = 60.0  # seconds
LOOK_BACK = "7d"  # age of the oldest samples
COLUMN_PIXELS, ROW_PIXELS = 64, 30
MAX_LEGENDS, MAX_ROWS = 12, 50
_HIDDEN = frozenset(("__name__", "alertstate", "monitor"))
_FIRST = ("alertname", "severity", "run")  # the first columns of a table
_ORDER = {"critical": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The time range of a page, in seconds since 1970."""

    start: float
    end: float

    @property
    def step(self) -> float:
        return max((self.end - self.start) / POINTS, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelData:
    """The result of one query: series, or why there are none."""

    query: Query
    series: Sequence[Series] = ()
    problem: str = ""


def write_page(
    path: Path, *, prometheus: str, dashboards: Path, run: str, seconds: float | None = None
) -> int:
    """Draw the dashboards of a folder for the last `seconds` of a run, or for all of it (None).
    Return the number of panels that have data."""
    source = Prometheus(prometheus)
    span = lifetime(source, run)
    if seconds is not None:
        span = Span(start=max(span.start, span.end - seconds), end=span.end)
    page = Page(source, run, span)
    text = page.html(read_dashboards(dashboards))
    path.write_text(text, encoding="utf-8")
    return page.panels_with_data


def lifetime(source: MetricsSource, run: str) -> Span:
    """The times of the first and the last sample of a run."""
    name = Query(expression='m3pc_build_info{run=~"$run"}', legend="", instant=True, interval=5.0)
    series = with_variables(name, run, step=15.0).expression
    now = datetime.now(UTC).timestamp()
    times = []
    for which in ("min", "max"):
        expression = f"{which}({which}_over_time(timestamp({series})[{LOOK_BACK}:15s]))"
        results = source.instant(expression, now)
        times += [result.points[0][1] for result in results if result.points]
    if len(times) < 2:
        raise InputError(
            f"this Prometheus knows no run {run!r} of the last {LOOK_BACK}; look at its targets"
        )
    start, end = times
    end = now if now - end < MIN_SPAN else end  # the run still goes on
    return Span(start=min(start, end - MIN_SPAN), end=end)


class Page:
    """Draws dashboards with the data of a run."""

    def __init__(self, source: MetricsSource, run: str, span: Span) -> None:
        self._source, self._run, self._span = source, run, span
        self.panels_with_data = 0

    def html(self, dashboards: Sequence[Dashboard]) -> str:
        with ThreadPoolExecutor(4) as pool:
            panels = [panel for dashboard in dashboards for panel in dashboard.panels]
            data = dict(zip(map(id, panels), pool.map(self._fetch, panels), strict=True))
        sections = [
            _section(dashboard, [self._card(panel, data[id(panel)]) for panel in dashboard.panels])
            for dashboard in dashboards
        ]
        links = "".join(
            f'<a href="#{escape(dashboard.uid)}">{escape(_short(dashboard.title))}</a>'
            for dashboard in dashboards
        )
        return _document(
            title=f"{self._run} · M³PC",
            head=f"<h1>{escape(self._run)}</h1><nav>{links}</nav>{_when(self._span)}",
            body=_alerts(self._run_alerts()) + "".join(sections),
        )

    def _run_alerts(self) -> list[Alert]:
        alerts = self._source.alerts()
        return [alert for alert in alerts if alert.labels.get("run", self._run) == self._run]

    def _fetch(self, panel: DashboardPanel) -> list[PanelData]:
        return [self._query(query) for query in panel.queries]

    def _query(self, query: Query) -> PanelData:
        span, step = self._span, max(self._span.step, query.interval)
        filled = with_variables(query, self._run, step=step)
        try:
            if query.instant:
                series = self._source.instant(filled.expression, span.end)
            else:
                count = int((span.end - span.start) / step)  # the last point is at the end
                start = span.end - count * step
                series = self._source.range(filled.expression, start, span.end, step)
        except InputError as error:
            return PanelData(query=query, problem=str(error))
        return PanelData(query=query, series=[line for line in series if line.points])

    # Panels

    def _card(self, panel: DashboardPanel, answers: Sequence[PanelData]) -> str:
        problems = [answer.problem for answer in answers if answer.problem]
        if problems:
            content = f'<p class="none">{escape(problems[0])}</p>'
        elif not any(answer.series for answer in answers):
            why = next((answer.query.optional for answer in answers), "")
            content = f'<p class="none">no data{escape(f": {why}" if why else "")}</p>'
        else:
            self.panels_with_data += 1
            content = self._content(panel, answers)
        column, row = f"{panel.x + 1}/span {panel.width}", f"{panel.y + 1}/span {panel.height}"
        return (
            f'<article class="{escape(panel.kind)}" style="grid-column:{column};grid-row:{row}">'
            f'<h3 title="{escape(panel.description)}">{escape(panel.title)}</h3>'
            f'<p class="what">{escape(panel.description)}</p>{content}</article>'
        )

    def _content(self, panel: DashboardPanel, answers: Sequence[PanelData]) -> str:
        if panel.kind == "table":
            return _table([series.labels for answer in answers for series in answer.series])
        named = [
            (_legend(answer.query.legend, series.labels), series.points)
            for answer in answers
            for series in answer.series
        ]
        if panel.kind == "stat":
            return "".join(
                _number(panel, name, points[-1][1], len(named)) for name, points in named
            )
        if len(panel.queries) == 1:  # with several queries, the legend keeps their order
            named.sort(key=_natural)
        lines = coloured_lines(panel, named)
        step = max(self._span.step, *(query.interval for query in panel.queries))
        is_line = panel.kind == "timeseries"
        frame = PlotArea(
            start=self._span.start,
            end=self._span.end,
            step=step,
            width=panel.width * COLUMN_PIXELS - 32,
            height=panel.height * ROW_PIXELS - 40 if is_line else timeline_height(len(lines)),
        )
        if is_line:
            return line_chart(panel, lines, frame) + _legends(panel, lines)
        hidden = len(lines) - MAX_LANES
        more = f'<p class="none">and {hidden} more</p>' if hidden > 0 else ""
        return timeline(panel, lines, frame) + more


def _natural(named: tuple[str, object]) -> tuple[tuple[int, str], ...]:
    """Sort key of natural order: slot 10 comes after slot 9."""
    return tuple(
        (int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", named[0])
    )


def _legend(form: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda at: labels.get(at[1], ""), form)


def _number(panel: DashboardPanel, name: str, value: float, of: int) -> str:
    text, colour = panel.mappings.get(f"{value:g}", ("", ""))
    text = text or format_value(value, panel.unit, panel.decimals)
    colour = colour or threshold_colour(panel, value)
    label = f"<small>{escape(name)}</small>" if of > 1 else ""
    return f'<span class="number" style="color:{escape(colour)}">{escape(text)}{label}</span>'


def _legends(panel: DashboardPanel, lines: Sequence[Line]) -> str:
    listed = lines[:MAX_LEGENDS]
    parts = []
    for line in listed:
        last = format_value(line.points[-1][1], panel.unit, panel.decimals)
        style = f"border-top:3px {'dashed' if line.dashed else 'solid'} {line.colour}"
        parts.append(
            f'<li><i style="{escape(style)}"></i>{escape(line.name)}<b>{escape(last)}</b></li>'
        )
    if len(lines) > len(listed):
        parts.append(f"<li>and {len(lines) - len(listed)} more</li>")
    return f"<ul>{''.join(parts)}</ul>"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    names = {name for row in rows for name in row} - _HIDDEN
    columns = [name for name in _FIRST if name in names]
    columns += sorted(names - set(columns))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in columns) + "</tr>"
        for row in rows[:MAX_ROWS]
    )
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


# The page around them


def _section(dashboard: Dashboard, cards: Sequence[str]) -> str:
    rows = "".join(
        f'<h4 style="grid-column:1/span {COLUMNS};grid-row:{row.y + 1}">{escape(row.title)}</h4>'
        for row in dashboard.rows
    )
    return (
        f'<section id="{escape(dashboard.uid)}"><h2>{escape(_short(dashboard.title))}</h2>'
        f'<p class="what">{escape(dashboard.description)}</p>'
        f'<div class="board">{rows}{"".join(cards)}</div></section>'
    )


def _alerts(alerts: Sequence[Alert]) -> str:
    """Firing alerts, the most severe first, and whether alerting itself works."""
    firing = [alert for alert in alerts if alert.state == "firing"]
    names = {alert.labels.get("alertname", "") for alert in firing}
    listed = [alert for alert in firing if alert.labels.get("severity") != "none"]
    rows = "".join(_alert(alert) for alert in sorted(listed, key=_severity))
    if "Watchdog" not in names:
        note = '<p class="bad">The watchdog does not fire: no alert would be seen.</p>'
    else:
        note = "" if rows else '<p class="good">No alert fires.</p>'
    table = (
        "<table><tr><th></th><th>alert</th><th>what</th><th>since</th><th>what to do</th></tr>"
        f"{rows}</table>"
        if rows
        else ""
    )
    return f'<section class="alerts"><h2>Alerts</h2>{note}{table}</section>'


def _severity(alert: Alert) -> tuple[int, str]:
    return _ORDER.get(alert.labels.get("severity", ""), 9), alert.labels.get("alertname", "")


def _alert(alert: Alert) -> str:
    severity = alert.labels.get("severity", "")
    level = severity if severity in _ORDER else "info"
    cells = (
        alert.labels.get("alertname", ""),
        alert.annotations.get("description", ""),
        alert.since[:19].replace("T", " "),
        alert.annotations.get("runbook", ""),
    )
    row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><td><em class="{level}">{escape(severity)}</em></td>{row}</tr>'


def _when(span: Span) -> str:
    start, end = (datetime.fromtimestamp(at, UTC) for at in (span.start, span.end))
    form = "%H:%M" if start.date() == end.date() else "%Y-%m-%d %H:%M"
    return f"<p>{start:%Y-%m-%d %H:%M} to {end.strftime(form)} UTC</p>"


def _short(title: str) -> str:
    return title.removeprefix("M³PC / ")


def _document(*, title: str, head: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><header>{head}</header><main>{body}</main></body></html>\n"
    )


_STYLE = """
:root { color-scheme: light; --ink: #1c2430; --soft: #667284; --edge: #dfe4eb; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 60px; }
body { margin: 0; background: #f3f5f8; color: var(--ink);
  font: 14px/1.4 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header { position: sticky; top: 0; z-index: 1; display: flex; gap: 28px; align-items: baseline;
  padding: 10px 24px; background: #fff; border-bottom: 1px solid var(--edge); }
header p { margin: 0 0 0 auto; color: var(--soft); }
h1 { margin: 0; font-size: 18px; }
nav { display: flex; gap: 18px; }
a { color: #2f6fd0; text-decoration: none; }
main { max-width: 1600px; margin: 0 auto; padding: 8px 24px 48px; }
h2 { margin: 22px 0 2px; font-size: 20px; }
h3 { margin: 0; font-size: 13px; font-weight: 600; }
h4 { margin: 12px 0 0; font-size: 14px; color: var(--soft); font-weight: 600; align-self: end; }
.what { margin: 0 0 4px; color: var(--soft); font-size: 12px; }
.board { display: grid; grid-template-columns: repeat(24, 1fr); gap: 0 10px;
  grid-auto-rows: auto; }
article { background: #fff; border: 1px solid var(--edge); border-radius: 6px; min-width: 0;
  padding: 10px 12px 6px; margin: 5px 0; }
article .what { font-size: 11px; min-height: 2.8em; display: -webkit-box; overflow: hidden;
  -webkit-line-clamp: 2; -webkit-box-orient: vertical; }
.stat .what { min-height: 0; -webkit-line-clamp: 2; }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: #e9edf2; }
.tick { fill: var(--soft); font-size: 11px; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
g:hover .line { stroke-width: 3; }
.threshold { stroke-dasharray: 3 4; opacity: 0.7; }
ul { display: flex; flex-wrap: wrap; gap: 1px 14px; margin: 4px 0 2px; padding: 0; font-size: 12px;
  list-style: none; color: var(--soft); }
li { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
li i { display: inline-block; width: 16px; margin-right: 6px; vertical-align: middle; }
li b { margin-left: 6px; color: var(--ink); font-weight: 600; }
.number { font-size: 26px; font-weight: 650; margin-right: 18px; white-space: nowrap; }
.number small { margin-left: 6px; font-size: 12px; font-weight: 400; color: var(--soft); }
.none { color: var(--soft); font-size: 12px; }
.scroll { overflow: auto; max-height: 300px; }
table { border-collapse: collapse; width: 100%; font-size: 12px; }
.alerts table { background: #fff; border: 1px solid var(--edge); }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--edge); vertical-align: top; }
em { padding: 1px 7px; border-radius: 9px; color: #fff; font-style: normal; font-size: 11px; }
.critical { background: #d33c3c; } .warning { background: #d99a00; } .info { background: #2f6fd0; }
.good { color: #2a9a5b; } .bad { color: #d33c3c; }
@media (max-width: 900px) { .board { display: block; } }
"""
