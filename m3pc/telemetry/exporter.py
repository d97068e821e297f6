"""A run's metrics over HTTP, for Prometheus: GET /metrics, /healthz, /readyz and nothing else.

Whoever drives the run hands over a snapshot now and then; requests are answered from the last one,
so a scrape never waits for the run, nor the run for a scrape.
"""

import hmac
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from m3pc.core.http_server import GuardedServer, HttpReply
from m3pc.telemetry.catalogue import DROPPED_SERIES
from m3pc.telemetry.recorder import METRICS, MOST_SLOTS, SLOT, Metric, Snapshot

LOOPBACK: Final = "127.0.0.1"
PORT: Final = 9400
PORTS: Final = 100  # tried from there on, for several runs on one machine
MOST_SERIES: Final = 1500


class Exporter:
    """Serves until it is closed."""

    def __init__(
        self,
        host: str = LOOPBACK,
        port: int | None = None,
        *,
        info: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> None:
        """Without a port: the first that is free from 9400 on. `info` is told as labels of
        m3pc_build_info. With a token, whoever asks for metrics has to send it."""
        self._collector = PublishedSnapshot(info or {})
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        self._token, self._unready = token, "nothing was told yet"
        self._server = self._bound(host, port)

    @property
    def address(self) -> str:
        return self._server.address

    def update(self, snapshot: Snapshot, *, unready: str = "") -> None:
        """What is answered from now on; `unready` says what the run lacks, if anything."""
        self._collector.snapshot, self._unready = snapshot, unready

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, path: str, authorization: str) -> HttpReply:
        if path == "/healthz":
            return HttpReply(200, b"alive\n")
        if path == "/readyz":
            lacks = self._unready
            return HttpReply(503, f"{lacks}\n".encode()) if lacks else HttpReply(200, b"ready\n")
        if path != "/metrics":
            return HttpReply(404, b"GET /metrics, /healthz or /readyz\n")
        if self._token is not None and not _same(authorization, f"Bearer {self._token}"):
            return HttpReply(401, b"a bearer token is needed\n")
        return HttpReply(200, generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)

    def _bound(self, host: str, port: int | None) -> GuardedServer:
        """At the port, or at the first that is free."""
        ports = range(PORT, PORT + PORTS) if port is None else [port]
        for tried in ports:
            try:
                return GuardedServer(host, tried, self._answer)
            except OSError as error:
                last = error
        raise OSError(last.errno, f"no metrics can be served at {host}:{ports[0]}: {last.strerror}")


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


# What is told


class PublishedSnapshot(Collector):
    """The last snapshot as families: counters and histograms from 0 on, gauges once they were
    set."""

    def __init__(self, info: Mapping[str, str]) -> None:
        self._info, self._dropped = dict(info), 0
        self.snapshot: Snapshot = {}

    def collect(self) -> Iterator[Family]:
        left = MOST_SERIES
        for metric in METRICS.values():
            if metric is DROPPED_SERIES:
                continue
            family, size = _family(metric, self.snapshot.get(metric.name, {}))
            if size > left:
                self._dropped += size
                continue
            left -= size
            if family.samples:
                yield family
        told = GaugeMetricFamily("m3pc_build_info", "Versions, and whether Ray asks for a token.",
                                 labels=list(self._info))  # fmt: skip
        told.add_metric(list(self._info.values()), 1.0)
        yield told
        yield _family(DROPPED_SERIES, {"": [float(self._dropped)]})[0]


def _family(metric: Metric, found: Mapping[str, list[float]]) -> tuple[Family, int]:
    """And how many series it has."""
    labels = [metric.label] if metric.label else []
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for label, series in _series(metric, found):
            histogram.add_metric(label, list(_buckets(metric, series)), sum_value=series[-1])
        return histogram, len(histogram.samples)
    family = kinds[metric.kind](metric.name, metric.help, labels=labels)
    for label, series in _series(metric, found):
        family.add_metric(label, series[0])
    return family, len(family.samples)


def _series(
    metric: Metric, found: Mapping[str, list[float]]
) -> Iterator[tuple[list[str], list[float]]]:
    if metric.label == SLOT:
        names: Iterable[str] = list(found)[:MOST_SLOTS]
    else:
        names = metric.values or ("",)
    for name in names:
        series = found.get(name)
        if series is None and metric.kind == "gauge":
            continue
        yield [name] if metric.label else [], series or [0.0] * metric.width


def _buckets(metric: Metric, series: list[float]) -> Iterator[tuple[str, float]]:
    total = 0.0
    for bound, count in zip((*map(str, metric.buckets), "+Inf"), series[:-1], strict=True):
        total += count
        yield bound, total
