"""Draws dashboard panels as SVG and escapes all text from outside."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from m3pc.monitoring.dashboards import DashboardPanel
from m3pc.monitoring.units import axis_ticks, format_value, time_ticks

NAMED = {"green": "#2a9a5b", "yellow": "#d99a00", "red": "#d33c3c", "blue": "#2f6fd0"}
PALETTE = (
    *("#2f6fd0", "#e8833a", "#2a9a5b", "#c8489b", "#8a5fd0", "#17a2b8", "#b5892c", "#d33c3c"),
    *("#5c7a29", "#7f8a99", "#1d3f8a", "#a04a1f"),
)
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 8, 22  # pixels around a chart
MAX_LANES = 32
LANE_HEIGHT = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named series of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotArea:
    """The time range of a chart and its size in pixels."""

    start: float
    end: float
    step: float  # seconds; points more than two steps apart are not joined
    width: int
    height: int

    def x(self, at: float) -> float:
        share = (at - self.start) / (self.end - self.start)
        return LEFT + share * (self.width - LEFT - RIGHT)


def coloured_lines(
    panel: DashboardPanel, named: Sequence[tuple[str, tuple[tuple[float, float], ...]]]
) -> list[Line]:
    """Colour the lines by the panel's styles, or else by PALETTE."""
    lines = []
    for number, (name, points) in enumerate(named):
        styles = [style for style in panel.styles if style.pattern.search(name)]
        colour = next((style.colour for style in styles if style.colour), "")
        lines.append(
            Line(
                name=name,
                points=points,
                colour=css_colour(colour) or PALETTE[number % len(PALETTE)],
                dashed=any(style.dashed for style in styles),
            )
        )
    return lines


def css_colour(name: str) -> str:
    return NAMED.get(name, name)


def threshold_colour(panel: DashboardPanel, value: float) -> str:
    """The colour of the highest threshold that the value reaches; "" below all of them."""
    reached = [step.colour for step in panel.thresholds if value >= step.value]
    return css_colour(reached[-1]) if reached else ""


def line_chart(panel: DashboardPanel, lines: Sequence[Line], frame: PlotArea) -> str:
    low, high = _bounds(panel, [value for line in lines for _, value in line.points])
    inner = frame.height - TOP - BOTTOM

    def y(value: float) -> float:
        return TOP + (1 - (value - low) / (high - low)) * inner

    marks = axis_ticks(
        low,
        high,
        max_ticks=max(inner // 34, 2),
        unit=panel.unit,
        integers=panel.decimals == 0,
    )
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y(at):.1f}" '
        f'y2="{y(at):.1f}"/><text class="tick" x="{LEFT - 6}" y="{y(at) + 4:.1f}" '
        f'text-anchor="end">{escape(format_value(at, panel.unit))}</text>'
        for at in marks
    ]
    parts += _time_axis(frame)
    parts += [
        f'<line class="threshold" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y(step.value):.1f}" '
        f'y2="{y(step.value):.1f}" stroke="{escape(css_colour(step.colour))}"/>'
        for step in panel.thresholds
        if low < step.value < high
    ]
    parts += [_path(line, panel, frame, y(low), y) for line in lines]
    return _svg(frame, parts)


def _bounds(panel: DashboardPanel, values: Sequence[float]) -> tuple[float, float]:
    low = min([*values, *([] if panel.minimum is None else [panel.minimum])], default=0.0)
    high = max([*values, *([] if panel.maximum is None else [panel.maximum])], default=1.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        room = abs(high) / 2 or 0.5
        return (low, high + 2 * room) if low == panel.minimum else (low - room, high + room)
    room = 0.05 * (high - low)
    return (
        low if low == panel.minimum else low - room,
        high if high == panel.maximum else high + room,
    )


def _path(
    line: Line, panel: DashboardPanel, frame: PlotArea, floor: float, y: Callable[[float], float]
) -> str:
    parts = []
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    colour = escape(line.colour)
    for stretch in _stretches(line.points, frame.step):
        spots = [(frame.x(at), y(value)) for at, value in stretch]
        path = "L".join(f"{x:.1f} {height:.1f}" for x, height in spots)
        if len(spots) == 1:
            x, height = spots[0]
            parts.append(f'<circle cx="{x:.1f}" cy="{height:.1f}" r="2" fill="{colour}"/>')
            continue
        if not line.dashed:
            parts.append(
                f'<path d="M{path}L{spots[-1][0]:.1f} {floor:.1f}L{spots[0][0]:.1f} {floor:.1f}Z" '
                f'fill="{colour}" opacity="0.07"/>'
            )
        parts.append(f'<path class="line" d="M{path}" stroke="{colour}"{dash}/>')
    last = (
        f": {format_value(line.points[-1][1], panel.unit, panel.decimals)}" if line.points else ""
    )
    return f"<g><title>{escape(line.name + last)}</title>{''.join(parts)}</g>"


def _stretches(
    points: Sequence[tuple[float, float]], step: float
) -> Iterator[list[tuple[float, float]]]:
    """Split points at gaps of more than two steps."""
    stretch = list(points[:1])
    for before, now in pairwise(points):
        if now[0] - before[0] > 2 * step:
            yield stretch
            stretch = []
        stretch.append(now)
    if stretch:
        yield stretch


def timeline(panel: DashboardPanel, lines: Sequence[Line], frame: PlotArea) -> str:
    """Draw a lane for each line, coloured by its values."""
    lanes = lines[:MAX_LANES]
    top = TOP
    parts = _time_axis(frame)
    for lane in lanes:
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{top + LANE_HEIGHT / 2 + 4:.1f}" '
            f'text-anchor="end">{escape(_cut(lane.name))}</text>'
        )
        for start, end, value in _intervals(lane.points, frame.step):
            x, width = frame.x(start), max(frame.x(min(end, frame.end)) - frame.x(start), 1.0)
            text, colour = _state(panel, value)
            parts.append(
                f'<rect x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="{LANE_HEIGHT - 4}" '
                f'rx="2" fill="{escape(colour)}"><title>{escape(f"{lane.name}: {text}")}</title>'
                "</rect>"
            )
        top += LANE_HEIGHT
    return _svg(frame, parts)


def timeline_height(lanes: int) -> int:
    return TOP + LANE_HEIGHT * min(max(lanes, 1), MAX_LANES) + BOTTOM


def _intervals(
    points: Sequence[tuple[float, float]], step: float
) -> Iterator[tuple[float, float, float]]:
    """Start, end and value of each interval in which the value does not change."""
    begin = 0
    for number, (at, value) in enumerate(points):
        last = number == len(points) - 1
        if last or points[number + 1][1] != value or points[number + 1][0] - at > 2 * step:
            yield points[begin][0], at + step, value
            begin = number + 1


def _state(panel: DashboardPanel, value: float) -> tuple[str, str]:
    text, colour = panel.mappings.get(f"{value:g}", ("", ""))
    return text or f"{value:g}", css_colour(colour) or threshold_colour(panel, value)


def _time_axis(frame: PlotArea) -> list[str]:
    bottom = frame.height - BOTTOM
    marks = time_ticks(frame.start, frame.end, max_ticks=max((frame.width - LEFT) // 80, 2))
    return [
        f'<line class="grid" x1="{frame.x(at):.1f}" x2="{frame.x(at):.1f}" y1="{TOP}" '
        f'y2="{bottom}"/><text class="tick" x="{frame.x(at):.1f}" y="{bottom + 15}" '
        f'text-anchor="middle">{name}</text>'
        for at, name in marks
    ]


def _svg(frame: PlotArea, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img">{"".join(parts)}</svg>'


def _cut(name: str, length: int = 11) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
