"""All dashboards of a run as one HTML page that needs nothing else, for people without Grafana."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from m3pc.monitoring.charts import (
    MOST_LANES,
    Line,
    PlotArea,
    coloured,
    line_chart,
    threshold_colour,
    timeline,
    timeline_height,
)
from m3pc.monitoring.dashboards import COLUMNS, Board, DashboardPanel, Query, filled
from m3pc.monitoring.dashboards import boards as read_boards
from m3pc.monitoring.prometheus_api import Alert, MetricsSource, Prometheus, Series
from m3pc.monitoring.units import shown
from m3pc.types import InputError

POINTS = 240  # of a line, from left to right
SHORTEST = 60.0  # seconds that a page shows at least
LOOK_BACK = "7d"  # how long ago a run may have begun
COLUMN_PIXELS, ROW_PIXELS = 64, 30
MOST_LEGENDS, MOST_ROWS = 12, 50
_HIDDEN = frozenset(("__name__", "alertstate", "monitor"))
_FIRST = ("alertname", "severity", "run")  # columns of a table
_ORDER = {"critical": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    start: float
    end: float

    @property
    def step(self) -> float:
        return max((self.end - self.start) / POINTS, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelData:
    """To one query: series, or why there are none."""

    query: Query
    series: Sequence[Series] = ()
    problem: str = ""


def write_page(
    path: Path, *, prometheus: str, boards: Path, run: str, seconds: float | None = None
) -> int:
    """Dashboards of a folder with a run's last seconds, or with all of it; how many panels have
    something to show."""
    source = Prometheus(prometheus)
    span = lifetime(source, run)
    if seconds is not None:
        span = Span(start=max(span.start, span.end - seconds), end=span.end)
    page = Page(source, run, span)
    text = page.html(read_boards(boards))
    path.write_text(text, encoding="utf-8")
    return page.shown


def lifetime(source: MetricsSource, run: str) -> Span:
    """Since when, and until when, a run was seen."""
    name = Query(expression='m3pc_build_info{run=~"$run"}', legend="", instant=True, interval=5.0)
    series = filled(name, run, step=15.0).expression
    now = datetime.now(UTC).timestamp()
    found = []
    for which in ("min", "max"):
        asked = f"{which}({which}_over_time(timestamp({series})[{LOOK_BACK}:15s]))"
        found += [each.points[0][1] for each in source.instant(asked, now) if each.points]
    if len(found) < 2:
        raise InputError(
            f"this Prometheus knows no run {run!r} of the last {LOOK_BACK}; look at its targets"
        )
    start, end = found
    end = now if now - end < SHORTEST else end  # it goes on
    return Span(start=min(start, end - SHORTEST), end=end)


class Page:
    def __init__(self, source: MetricsSource, run: str, span: Span) -> None:
        self._source, self._run, self._span = source, run, span
        self.shown = 0

    def html(self, all_boards: Sequence[Board]) -> str:
        with ThreadPoolExecutor(4) as pool:
            wanted = [panel for board in all_boards for panel in board.panels]
            answers = dict(zip(map(id, wanted), pool.map(self._ask, wanted), strict=True))
        bodies = []
        for board in all_boards:
            panels = [(panel, answers[id(panel)]) for panel in board.panels]
            bodies.append(_section(board, [self._card(*each) for each in panels]))
        links = "".join(
            f'<a href="#{escape(board.uid)}">{escape(_short(board.title))}</a>'
            for board in all_boards
        )
        return _document(
            title=f"{self._run} · M³PC",
            head=f"<h1>{escape(self._run)}</h1><nav>{links}</nav>{_when(self._span)}",
            body=_alerts(self._own(self._source.alerts())) + "".join(bodies),
        )

    def _own(self, alerts: Sequence[Alert]) -> list[Alert]:
        return [alert for alert in alerts if alert.labels.get("run", self._run) == self._run]

    def _ask(self, panel: DashboardPanel) -> list[PanelData]:
        return [self._answer(query) for query in panel.queries]

    def _answer(self, query: Query) -> PanelData:
        span, step = self._span, max(self._span.step, query.interval)
        made = filled(query, self._run, step=step)
        try:
            if query.instant:
                series = self._source.instant(made.expression, span.end)
            else:
                count = int((span.end - span.start) / step)  # the last point is at the end
                start = span.end - count * step
                series = self._source.range(made.expression, start, span.end, step)
        except InputError as error:
            return PanelData(query=query, problem=str(error))
        return PanelData(query=query, series=[each for each in series if each.points])

    # Panels

    def _card(self, panel: DashboardPanel, answers: Sequence[PanelData]) -> str:
        problems = [answer.problem for answer in answers if answer.problem]
        if problems:
            content = f'<p class="none">{escape(problems[0])}</p>'
        elif not any(answer.series for answer in answers):
            why = next((answer.query.optional for answer in answers), "")
            content = f'<p class="none">no data{escape(f": {why}" if why else "")}</p>'
        else:
            self.shown += 1
            content = self._content(panel, answers)
        return (
            f'<article class="{escape(panel.kind)}" style="{_place(panel)}">'
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
        lines = coloured(panel, sorted(named, key=_natural) if _is_long(panel, named) else named)
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
        hidden = len(lines) - MOST_LANES
        more = f'<p class="none">and {hidden} more</p>' if hidden > 0 else ""
        return timeline(panel, lines, frame) + more


def _place(panel: DashboardPanel) -> str:
    return (
        f"grid-column:{panel.x + 1}/span {panel.width};grid-row:{panel.y + 1}/span {panel.height}"
    )


def _is_long(panel: DashboardPanel, named: Sequence[object]) -> bool:
    return len(panel.queries) == 1 and len(named) > 1


def _natural(named: tuple[str, object]) -> tuple[tuple[int, str], ...]:
    """Slot 10 comes after slot 9."""
    return tuple(
        (int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", named[0])
    )


def _legend(form: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda at: labels.get(at[1], ""), form)


def _number(panel: DashboardPanel, name: str, value: float, of: int) -> str:
    text, colour = panel.mappings.get(f"{value:g}", ("", ""))
    text = text or shown(value, panel.unit, panel.decimals)
    colour = colour or threshold_colour(panel, value)
    label = f"<small>{escape(name)}</small>" if of > 1 else ""
    return f'<span class="number" style="color:{escape(colour)}">{escape(text)}{label}</span>'


def _legends(panel: DashboardPanel, lines: Sequence[Line]) -> str:
    shown_lines = lines[:MOST_LEGENDS]
    parts = []
    for line in shown_lines:
        last = shown(line.points[-1][1], panel.unit, panel.decimals)
        style = f"border-top:3px {'dashed' if line.dashed else 'solid'} {line.colour}"
        parts.append(
            f'<li><i style="{escape(style)}"></i>{escape(line.name)}<b>{escape(last)}</b></li>'
        )
    if len(lines) > len(shown_lines):
        parts.append(f"<li>and {len(lines) - len(shown_lines)} more</li>")
    return f"<ul>{''.join(parts)}</ul>"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    names = {name for row in rows for name in row} - _HIDDEN
    columns = [name for name in _FIRST if name in names]
    columns += sorted(names - set(columns))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in columns) + "</tr>"
        for row in rows[:MOST_ROWS]
    )
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


# The page around them


def _section(board: Board, cards: Sequence[str]) -> str:
    rows = "".join(
        f'<h4 style="grid-column:1/span {COLUMNS};grid-row:{row.y + 1}">{escape(row.title)}</h4>'
        for row in board.rows
    )
    return (
        f'<section id="{escape(board.uid)}"><h2>{escape(_short(board.title))}</h2>'
        f'<p class="what">{escape(board.description)}</p>'
        f'<div class="board">{rows}{"".join(cards)}</div></section>'
    )


def _alerts(alerts: Sequence[Alert]) -> str:
    """Those that fire, the worst first; and whether any would."""
    firing = [alert for alert in alerts if alert.state == "firing"]
    names = {alert.labels.get("alertname", "") for alert in firing}
    told = "".join(_alert(alert) for alert in sorted(firing, key=_severity) if _counts(alert))
    if "Watchdog" not in names:
        note = '<p class="bad">The watchdog does not fire: no alert would be seen.</p>'
    else:
        note = "" if told else '<p class="good">No alert fires.</p>'
    table = (
        "<table><tr><th></th><th>alert</th><th>what</th><th>since</th><th>what to do</th></tr>"
        f"{told}</table>"
        if told
        else ""
    )
    return f'<section class="alerts"><h2>Alerts</h2>{note}{table}</section>'


def _counts(alert: Alert) -> bool:
    return alert.labels.get("severity") != "none"


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
