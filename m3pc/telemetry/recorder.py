"""Metrics: declared once, recorded in every process, and merged by the driver of a run.

A process keeps running totals and returns complete snapshots: a snapshot that is lost or arrives
twice changes nothing. `RunTotals` keeps the counts of ended processes, so no count ever shrinks.
"""

import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
# How gauges of several processes are merged; counters and histograms are always summed.
Reduce = Literal["sum", "max", "min"]
SLOT = "slot"  # label of an actor's slot; only the driver records series with this label
MAX_SLOTS = 256  # exported series per metric with the label SLOT
# metric -> label value ("" without a label) -> [value]. A histogram has instead the number of
# observations in each bucket and beyond the last one, then the sum of all observations.
Snapshot = Mapping[str, Mapping[str, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric and its place in METRICS. Names and labels follow Prometheus' conventions."""

    name: str
    kind: MetricKind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()  # all values of the label; empty for SLOT, which is a number
    buckets: tuple[float, ...] = ()  # upper ends of a histogram's buckets
    reduce: Reduce = "sum"

    def __post_init__(self) -> None:
        assert (self.kind == "counter") == self.name.endswith("_total"), self.name
        assert (self.kind == "histogram") == bool(self.buckets), self.name
        assert bool(self.label) == bool(self.values) or self.label == SLOT, self.name
        METRICS[self.name] = self

    @property
    def width(self) -> int:
        """The length of a series in a snapshot."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


METRICS: dict[str, Metric] = {}


class Recorder:
    """Running totals of one process; any thread may record."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, dict[str, list[float]]] = {}

    def add(self, metric: Metric, amount: float = 1.0, label: str = "") -> None:
        """Increase a counter."""
        assert metric.kind == "counter" and amount >= 0, metric.name
        with self._lock:
            self._series(metric, label)[0] += amount

    def set(self, metric: Metric, value: float, label: str = "") -> None:
        """Set a gauge."""
        assert metric.kind == "gauge", metric.name
        with self._lock:
            self._series(metric, label)[0] = value

    def observe(self, metric: Metric, value: float, label: str = "") -> None:
        """Add an observation to a histogram."""
        assert metric.kind == "histogram", metric.name
        with self._lock:
            series = self._series(metric, label)
            series[bisect_left(metric.buckets, value)] += 1
            series[-1] += value

    def snapshot(self) -> Snapshot:
        """A copy of all totals."""
        with self._lock:
            return {
                name: {label: list(series) for label, series in labels.items()}
                for name, labels in self._totals.items()
            }

    def _series(self, metric: Metric, label: str) -> list[float]:
        assert label in (metric.values or ("",)), f"{metric.name} has no {label!r}"
        by_label = self._totals.setdefault(metric.name, {})
        return by_label.setdefault(label, [0.0] * metric.width)


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Merge the snapshots of several processes; metrics that are not in METRICS are left out."""
    totals: dict[str, dict[str, list[float]]] = {}
    for snapshot in snapshots:
        for name, labels in snapshot.items():
            if name in METRICS:
                by_label = totals.setdefault(name, {})
                for label, series in labels.items():
                    known = by_label.get(label)
                    by_label[label] = _merge_series(METRICS[name], known, series)
    return totals


def _merge_series(metric: Metric, known: list[float] | None, series: list[float]) -> list[float]:
    if known is None:
        return list(series)
    if metric.kind == "gauge" and metric.reduce != "sum":
        return [{"max": max, "min": min}[metric.reduce](known[0], series[0])]
    return [a + b for a, b in zip(known, series, strict=True)]


def value(snapshot: Snapshot, metric: Metric, label: str = "") -> float:
    """A counter (0 before it is first increased) or a gauge (NaN before it is first set)."""
    series = snapshot.get(metric.name, {}).get(label)
    if series is None:
        return 0.0 if metric.kind == "counter" else math.nan
    return series[0]


def quantile(snapshot: Snapshot, metric: Metric, share: float, label: str = "") -> float:
    """Estimated quantile of a histogram, linear within a bucket; NaN without observations."""
    counts = _counts(snapshot, metric, label)
    remaining = share * sum(counts)
    if not remaining:
        return math.nan
    low = 0.0
    for count, high in zip(counts, metric.buckets, strict=False):
        if count >= remaining:
            return low + (high - low) * remaining / count
        remaining, low = remaining - count, high
    return low  # beyond the last bucket: a lower bound


def share_above(snapshot: Snapshot, metric: Metric, bound: float, label: str = "") -> float:
    """Share of a histogram's observations in buckets that end above the bound; NaN without any."""
    counts = _counts(snapshot, metric, label)
    within = sum(counts[: bisect_right(metric.buckets, bound)])
    return 1 - within / sum(counts) if any(counts) else math.nan


def mean(snapshot: Snapshot, metric: Metric, label: str = "") -> float:
    """Mean of a histogram's observations; NaN without any."""
    counts = _counts(snapshot, metric, label)
    return snapshot[metric.name][label][-1] / sum(counts) if any(counts) else math.nan


def _counts(snapshot: Snapshot, metric: Metric, label: str) -> list[float]:
    return snapshot.get(metric.name, {}).get(label, [])[:-1]
