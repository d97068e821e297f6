"""Formats numbers in Grafana's units and places the ticks of an axis."""

import math
from datetime import UTC, datetime

UnitScale = tuple[tuple[float, str], ...]  # (size, name), the largest first
_SHORT: UnitScale = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BYTES: UnitScale = (
    (2.0**40, "TiB"),
    (2.0**30, "GiB"),
    (2.0**20, "MiB"),
    (2.0**10, "KiB"),
    (1.0, "B"),
)
_SECONDS: UnitScale = (
    (86400.0, "d"),
    (3600.0, "h"),
    (60.0, "min"),
    (1.0, "s"),
    (1e-3, "ms"),
    (1e-6, "µs"),
)
# Seconds between two ticks of a time axis.
_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY = 86400.0


# unit -> factor, scale of the result, suffix
_PLAIN: UnitScale = ((1.0, ""),)
UNITS: dict[str, tuple[float, UnitScale, str]] = {
    "s": (1.0, _SECONDS, ""),
    "ms": (1e-3, _SECONDS, ""),
    "bytes": (1.0, _BYTES, ""),
    "Bps": (1.0, _BYTES, "/s"),
    "ops": (1.0, _SHORT, "/s"),
    "reqps": (1.0, _SHORT, "/s"),
    "percentunit": (100.0, _PLAIN, " %"),
    "percent": (1.0, _PLAIN, " %"),
    "short": (1.0, _SHORT, ""),
    "none": (1.0, _PLAIN, ""),
}


def format_value(value: float, unit: str, decimals: int | None = None) -> str:
    """Format with three significant digits, or with `decimals` digits after the point."""
    if not math.isfinite(value):
        return "-"
    factor, scale, suffix = UNITS.get(unit, UNITS["none"])
    value *= factor
    size, name = next((step for step in scale if abs(value) >= step[0]), scale[-1])
    if not value:
        size, name = next(step for step in scale if step[0] == 1.0)
    return f"{_digits(value / size, decimals)}{' ' * bool(name)}{name}{suffix}"


def _digits(value: float, decimals: int | None) -> str:
    if decimals is None:
        size = math.floor(math.log10(abs(value))) if value else 0
        decimals = min(max(2 - size, 0), 6)
        text = f"{value:,.{decimals}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:,.{decimals}f}"
    return "0" if text in ("-0", "0") else text


def axis_ticks(
    low: float, high: float, *, max_ticks: int, unit: str, integers: bool = False
) -> list[float]:
    """Evenly spaced round numbers from `low` to `high`, integers if `integers` is set."""
    step = _round_step((high - low) / max_ticks, unit)
    step = math.ceil(step) if integers or unit == "bytes" else step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _round_step(minimum: float, unit: str) -> float:
    if unit in ("bytes", "Bps"):
        return float(2.0 ** math.ceil(math.log2(minimum)))
    if unit == "s" and 10 < minimum <= _TIMES[-1]:
        return float(next(step for step in _TIMES if step >= minimum))
    size = 10.0 ** math.floor(math.log10(minimum))
    return next(size * n for n in (1, 2, 2.5, 5, 10) if size * n >= minimum * (1 - 1e-9))


def time_ticks(start: float, end: float, *, max_ticks: int) -> list[tuple[float, str]]:
    """Round times from `start` to `end` (seconds since 1970) and their labels, in UTC."""
    minimum = (end - start) / max_ticks
    days = math.ceil(minimum / _DAY) * _DAY
    step = next((float(step) for step in _TIMES if step >= minimum), days)
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < _DAY else "%d %b"
    first, last = math.ceil(start / step), math.floor(end / step)
    moments = [number * step for number in range(first, last + 1)]
    return [(at, datetime.fromtimestamp(at, UTC).strftime(form)) for at in moments]
