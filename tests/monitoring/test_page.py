"""Dashboards as one page: every panel is on it, and no text of Prometheus is trusted."""

import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from threading import Lock

import pytest

from m3pc.monitoring.charts import PlotArea, coloured_lines, line_chart, timeline
from m3pc.monitoring.dashboards import Dashboard, DashboardPanel, read_dashboards
from m3pc.monitoring.page import Page, Span, lifetime, write_page
from m3pc.monitoring.prometheus_api import Alert, Prometheus, Series
from m3pc.monitoring.units import axis_ticks, format_value, time_ticks
from m3pc.types import InputError
from tests.support.servers.pretend_run import PretendRun, pretended, served
from tests.support.servers.prometheus_server import prometheus
from tests.support.servers.redis_server import free_port
from tests.support.servers.shipped_monitoring import DASHBOARDS
from tests.support.servers.waiting import eventually

SPAN = Span(start=1_000_000.0, end=1_000_607.0)  # 5 s apart, with 2 left over
HOSTILE = "<script>alert('x')</script>\"&"
WATCHDOG = Alert(
    labels={"alertname": "Watchdog", "severity": "none"},
    annotations={},
    state="firing",
    since="2026-01-01T00:00:00Z",
)


class FakeSource:
    """Gives the same series to every query."""

    def __init__(
        self,
        series: Sequence[Series] = (),
        alerts: Sequence[Alert] = (WATCHDOG,),
        problem: str = "",
    ) -> None:
        self._series, self._alerts, self._problem = list(series), list(alerts), problem
        self._lock, self.queries = Lock(), 0

    def range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        steps = (end - start) / step
        assert steps == pytest.approx(round(steps)), "the last point is at the end"
        assert start > SPAN.start - 1e-3
        return self.instant(expression, end)

    def instant(self, expression: str, at: float) -> list[Series]:
        with self._lock:
            self.queries += 1
        if self._problem:
            raise InputError(self._problem)
        return self._series

    def alerts(self) -> list[Alert]:
        return self._alerts


class Outline(HTMLParser):
    """The opening tags in order, and the closing tags without one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.begun: list[str] = []
        self._open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.begun.append(tag)
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.begun.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(tag)


def line(labels: Mapping[str, str], values: Sequence[float], step: float = 15.0) -> Series:
    points = tuple((SPAN.start + step * number, value) for number, value in enumerate(values))
    return Series(labels=labels, points=points)


def all_panels() -> list[DashboardPanel]:
    return [panel for dashboard in read_dashboards(DASHBOARDS) for panel in dashboard.panels]


def panel(title: str) -> DashboardPanel:
    (named,) = [panel for panel in all_panels() if panel.title == title]
    return named


def html(source: FakeSource, run: str = "hopper") -> str:
    return Page(source, run, SPAN).html(read_dashboards(DASHBOARDS))


# The page


def test_every_panel_is_on_the_page_under_its_title() -> None:
    source = FakeSource([line({"part": "actor", "slot": "3"}, [1.0, 2.0, 3.0])])
    page = Page(source, "hopper", SPAN)
    text = page.html(read_dashboards(DASHBOARDS))
    panels = all_panels()
    assert page.panels_with_data == text.count("<article") == len(panels)
    assert source.queries == sum(len(panel.queries) for panel in panels)
    outline = Outline(text)
    assert outline.wrong == []
    charts = sum(panel.kind in ("timeseries", "state-timeline") for panel in panels)
    assert outline.begun.count("svg") == charts


def test_a_page_loads_no_other_resource() -> None:
    text = html(FakeSource([line({}, [1.0, 2.0])]))
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img|iframe)|https?://|url\(|@import", text)


def test_text_of_prometheus_is_escaped() -> None:
    bad = Alert(
        labels={"alertname": HOSTILE, "severity": HOSTILE},
        annotations={"description": HOSTILE, "runbook": HOSTILE},
        state="firing",
        since=HOSTILE,
    )
    labels = dict.fromkeys(
        ("alertname", "which", "part", "phase", "slot", "instance", "run", HOSTILE), HOSTILE
    )
    text = html(FakeSource([line(labels, [1.0, 2.0])], [WATCHDOG, bad]), run=HOSTILE)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "script" not in Outline(text).begun
    error = html(FakeSource(problem=HOSTILE))
    assert "<script" not in error and "&lt;script&gt;" in error


def test_a_panel_without_data_names_the_possible_reason() -> None:
    page = Page(FakeSource(), "hopper", SPAN)
    text = page.html(read_dashboards(DASHBOARDS))
    assert page.panels_with_data == 0 and "<svg" not in text
    assert "no data: no node exporter runs" in text
    assert "no data: D4RL has no score for the environment" in text


def test_an_error_of_a_query_is_shown_in_its_panel() -> None:
    text = html(FakeSource(problem="Prometheus refused query: parse error"))
    assert text.count("Prometheus refused query: parse error") == len(all_panels())


def test_alerts_of_the_run_are_listed_by_severity_and_those_of_others_are_not() -> None:
    def alert(name: str, severity: str, run: str, state: str = "firing") -> Alert:
        return Alert(
            labels={"alertname": name, "severity": severity, "run": run},
            annotations={"description": f"{name} in {run}", "runbook": f"docs/runbooks/{name}.md"},
            state=state,
            since="2026-01-01T10:20:30.5Z",
        )

    alerts = [
        alert("PlannerSlow", "warning", "hopper"),
        alert("ReplayDamaged", "critical", "hopper"),
        alert("NoActors", "critical", "walker"),
        alert("QBias", "warning", "hopper", "pending"),
        WATCHDOG,
    ]
    text = html(FakeSource(alerts=alerts))
    top = text[: text.index('id="m3pc-overview"')]
    assert top.index("ReplayDamaged in hopper") < top.index("PlannerSlow in hopper")
    assert "2026-01-01 10:20:30" in top and "docs/runbooks/ReplayDamaged.md" in top
    assert not any(name in top for name in ("NoActors", "QBias", "Watchdog"))


def test_that_no_alert_fires_is_stated_only_while_the_watchdog_does() -> None:
    assert "No alert fires." in html(FakeSource())
    text = html(FakeSource(alerts=[]))
    assert "No alert fires." not in text and "The watchdog does not fire" in text


def test_numbers_take_the_colour_of_the_threshold_they_reach() -> None:
    dashboard = Dashboard(
        uid="one", title="", description="", rows=(), panels=(panel("Slowest requests"),)
    )
    colours = {}
    for value in (0.1, 0.25, 3.0):
        page = Page(FakeSource([line({}, [value])]), "hopper", SPAN)
        text = page.html([dashboard])
        colours[value] = re.findall(r'style="color:(#\w+)', text)
    assert colours == {0.1: ["#2a9a5b"], 0.25: ["#d99a00"], 3.0: ["#d33c3c"]}


# Charts


def chart(title: str, named: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    shown = panel(title)
    lines = coloured_lines(shown, [(name, tuple(points)) for name, points in named.items()])
    frame = PlotArea(start=0.0, end=100.0, step=10.0, width=500, height=200)
    draw = line_chart if shown.kind == "timeseries" else timeline
    return draw(shown, lines, frame)


def test_a_line_has_a_gap_where_there_are_no_samples() -> None:
    unbroken = chart("Alpha", {"alpha": [(0, 1), (10, 2), (20, 3), (30, 2)]})
    broken = chart("Alpha", {"alpha": [(0, 1), (10, 2), (60, 3), (70, 2)]})
    alone = chart("Alpha", {"alpha": [(0, 1), (10, 2), (60, 3)]})
    assert [text.count('class="line"') for text in (unbroken, broken, alone)] == [1, 2, 1]
    assert [text.count("<circle") for text in (unbroken, broken, alone)] == [0, 0, 1]


def test_lines_stay_inside_their_chart() -> None:
    for values in ([0, 0, 0], [5, 5, 5], [-3, -2, -1], [0, 1e12, 3], [1e-9, 2e-9, 0]):
        text = chart("Updates owed", {"owed": [(10.0 * n, v) for n, v in enumerate(values)]})
        path = re.findall(r'class="line" d="M([^"]+)"', text)[0]
        heights = [float(spot.split()[1]) for spot in path.split("L")]
        assert all(8 <= height <= 178 for height in heights), values


def test_bounds_and_goals_are_dashed() -> None:
    points = [(0.0, 1.0), (10.0, 2.0)]
    text = chart("Entropy against its bound", {"entropy": points, "bound": points})
    assert text.count("stroke-dasharray=") == 1
    dashed = re.findall(r'stroke="([^"]+)" stroke-dasharray', text)
    assert dashed == ["#d33c3c"]


def test_a_threshold_is_drawn_where_the_axis_reaches_it() -> None:
    near = chart("Since the last update", {"ago": [(0, 0), (10, 400)]})
    far = chart("Since the last update", {"ago": [(0, 0), (10, 20)]})
    assert [text.count('class="threshold"') for text in (near, far)] == [1, 0]


def test_a_timeline_has_an_interval_for_every_change() -> None:
    text = chart(
        "Actors by slot", {"0": [(0, 1), (10, 1), (20, 0), (30, 1), (70, 1)], "1": [(0, 1)]}
    )
    assert re.findall(r"<title>(.*?)</title>", text) == [
        "0: up", "0: down", "0: up", "0: up", "1: up",
    ]  # fmt: skip


# Units


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 s"),
        (0.0471, "s", "47.1 ms"),
        (90, "s", "1.5 min"),
        (0.2, "ms", "200 µs"),
        (1536, "bytes", "1.5 KiB"),
        (8e10, "bytes", "74.5 GiB"),
        (2048, "Bps", "2 KiB/s"),
        (12345, "short", "12.3 k"),
        (-12345, "none", "-12,345"),
        (0.2512, "percentunit", "25.1 %"),
        (41.5, "percent", "41.5 %"),
        (1234.5, "ops", "1.23 k/s"),
        (float("nan"), "s", "-"),
        (1e-9, "none", "0"),
    ],
)
def test_numbers_are_shown_in_their_unit(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_ticks_are_round() -> None:
    assert axis_ticks(0, 1, max_ticks=5, unit="none") == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert axis_ticks(-7, 12, max_ticks=4, unit="none") == [-5, 0, 5, 10]
    assert axis_ticks(0, 4 * 2**30, max_ticks=4, unit="bytes") == [n * 2**30 for n in range(5)]
    assert axis_ticks(0, 200, max_ticks=4, unit="s") == [0, 60, 120, 180]
    assert axis_ticks(0, 1.05, max_ticks=4, unit="none", integers=True) == [0, 1]
    assert time_ticks(0, 3600, max_ticks=4) == [
        (0, "00:00"), (900, "00:15"), (1800, "00:30"), (2700, "00:45"), (3600, "01:00"),
    ]  # fmt: skip


# Prometheus


def answer(data: object) -> str:
    return json.dumps({"status": "success", "data": data})


def test_values_that_are_not_finite_are_left_out() -> None:
    result = [{"metric": {"a": "b"}, "values": [[1, "2"], [2, "NaN"], [3, "+Inf"], [4, "5"]]}]
    with served(answer({"resultType": "matrix", "result": result})) as address:
        (series,) = Prometheus(f"http://{address}").range("a", 0, 1, 1)
    assert series == Series(labels={"a": "b"}, points=((1.0, 2.0), (4.0, 5.0)))


@pytest.mark.parametrize(
    "text", ["not JSON", "{}", "[]", '{"data": []}', '{"data": {"resultType": "vector"}}']
)
def test_a_reply_that_is_not_prometheus_is_refused(text: str) -> None:
    with served(text) as address, pytest.raises(InputError, match="no Prometheus answers"):
        Prometheus(f"http://{address}").instant("a", 0)


def test_an_absent_prometheus_is_an_input_error() -> None:
    with pytest.raises(InputError, match="start it, or give its address"):
        Prometheus(f"http://127.0.0.1:{free_port()}").instant("a", 0)
    with pytest.raises(InputError, match="give http://HOST:PORT"):
        Prometheus("file:///etc/passwd")


def test_a_run_that_was_never_seen_is_refused() -> None:
    with pytest.raises(InputError, match="knows no run 'hopper'"):
        lifetime(FakeSource(), "hopper")


def test_a_page_is_drawn_from_a_real_prometheus(tmp_path: Path) -> None:
    path = tmp_path / "boards.html"
    with pretended(PretendRun()) as targets, prometheus(tmp_path, targets) as url:

        def drawn() -> int:
            """Panels with data."""
            try:
                return write_page(
                    path, prometheus=url, dashboards=DASHBOARDS, run="hopper", seconds=60
                )
            except InputError:  # not scraped yet
                return 0

        assert eventually(lambda: drawn() == len(all_panels()), patience=90)
        with pytest.raises(InputError, match="parse error"):
            Prometheus(url).instant("sum(", 0)
        with pytest.raises(InputError, match="knows no run"):
            write_page(path, prometheus=url, dashboards=DASHBOARDS, run="hop.er")
    text = path.read_text()
    assert "No alert fires." in text and "no data" not in text
    assert Outline(text).wrong == []
