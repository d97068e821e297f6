"""How metrics are recorded in every process and added up by whoever drives the run.

A process keeps running totals and hands out whole snapshots: one that is lost or arrives twice
changes nothing. Totals of a process that ended stay with whoever adds up, so none ever shrinks.
"""

import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
# How gauges of several processes become one; a counter or a histogram is always a sum.
Reduce = Literal["sum", "max", "min"]
SLOT = "slot"  # of an actor; series by slot come from the driver alone, and only so many
MOST_SLOTS = 256
# By metric, then by label value ("" without one): [value], or of a histogram the observations in
# each bucket, those beyond the last, and the sum of all observed.
Snapshot = Mapping[str, Mapping[str, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    kind: MetricKind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()  # of the label: a closed set, but for SLOT, which is a number
    buckets: tuple[float, ...] = ()
    reduce: Reduce = "sum"

    def __post_init__(self) -> None:
        assert (self.kind == "counter") == self.name.endswith("_total"), self.name
        assert (self.kind == "histogram") == bool(self.buckets), self.name
        assert bool(self.label) == bool(self.values) or self.label == SLOT, self.name
        METRICS[self.name] = self

    @property
    def width(self) -> int:
        """Numbers of one series in a snapshot."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


METRICS: dict[str, Metric] = {}


class Recorder:
    """The totals of one process; any thread may record."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, dict[str, list[float]]] = {}

    def add(self, metric: Metric, amount: float = 1.0, label: str = "") -> None:
        assert metric.kind == "counter" and amount >= 0, metric.name
        with self._lock:
            self._series(metric, label)[0] += amount

    def set(self, metric: Metric, value: float, label: str = "") -> None:
        assert metric.kind == "gauge", metric.name
        with self._lock:
            self._series(metric, label)[0] = value

    def observe(self, metric: Metric, value: float, label: str = "") -> None:
        assert metric.kind == "histogram", metric.name
        with self._lock:
            series = self._series(metric, label)
            series[bisect_left(metric.buckets, value)] += 1
            series[-1] += value

    def snapshot(self) -> Snapshot:
        with self._lock:
            return {
                name: {label: list(series) for label, series in labels.items()}
                for name, labels in self._totals.items()
            }

    def _series(self, metric: Metric, label: str) -> list[float]:
        assert label in (metric.values or ("",)), f"{metric.name} has no {label!r}"
        series = self._totals.setdefault(metric.name, {})
        return series.setdefault(label, [0.0] * metric.width)


def merged(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Of several processes; names that are not declared here are left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for snapshot in snapshots:
        for name, labels in snapshot.items():
            if name in METRICS:
                for label, series in labels.items():
                    known = found.setdefault(name, {})
                    known[label] = _joined(METRICS[name], known.get(label), series)
    return found


def _joined(metric: Metric, one: list[float] | None, other: list[float]) -> list[float]:
    if one is None:
        return list(other)
    if metric.kind == "gauge" and metric.reduce != "sum":
        return [{"max": max, "min": min}[metric.reduce](one[0], other[0])]
    return [a + b for a, b in zip(one, other, strict=True)]


def value(snapshot: Snapshot, metric: Metric, label: str = "") -> float:
    """Of a counter or gauge: NaN where a gauge was never set, 0 where nothing was counted."""
    series = snapshot.get(metric.name, {}).get(label)
    if series is None:
        return 0.0 if metric.kind == "counter" else math.nan
    return series[0]


def quantile(snapshot: Snapshot, metric: Metric, share: float, label: str = "") -> float:
    """Of a histogram, along a line inside its bucket; NaN where nothing was observed."""
    series = snapshot.get(metric.name, {}).get(label)
    counts = series[:-1] if series else []
    wanted = share * sum(counts)
    if not wanted:
        return math.nan
    low = 0.0
    for count, high in zip(counts, metric.buckets, strict=False):
        if count >= wanted:
            return low + (high - low) * wanted / count
        wanted, low = wanted - count, high
    return low  # beyond the last bucket: at least this


def share_above(snapshot: Snapshot, metric: Metric, bound: float, label: str = "") -> float:
    """Of what a histogram observed: in the buckets that end beyond the bound."""
    counts = snapshot.get(metric.name, {}).get(label, [])[:-1]
    within = sum(counts[: bisect_right(metric.buckets, bound)])
    return 1 - within / sum(counts) if any(counts) else math.nan


def mean(snapshot: Snapshot, metric: Metric, label: str = "") -> float:
    """Of what a histogram observed; NaN where that is nothing."""
    series = snapshot.get(metric.name, {}).get(label, [])
    return series[-1] / sum(series[:-1]) if any(series[:-1]) else math.nan
