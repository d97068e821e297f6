"""A run's metrics over HTTP, for Prometheus: GET /metrics, /healthz, /readyz and nothing else.

The run publishes snapshots, and requests are answered from the newest one. So a scrape never waits
for the run, nor the run for a scrape.
"""

from collections.abc import Iterator, Mapping
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
from starlette.types import Receive, Scope, Send

from m3pc.core.http_server import (
    BackgroundServer,
    ServerConfig,
    has_token,
    headers_of,
    is_cross_site,
    is_own_name,
)
from m3pc.telemetry.catalogue import DROPPED_SERIES
from m3pc.telemetry.recorder import MAX_SLOTS, METRICS, SLOT, Metric, Snapshot

LOOPBACK: Final = "127.0.0.1"
PORT: Final = 9400
PORTS: Final = 100  # ports to try, starting at PORT: several runs may share a machine
MAX_SERIES: Final = 1500
MAX_CONNECTIONS: Final = 8  # requests beyond the limit are answered 503
CONNECTION_SECONDS: Final = 10.0  # a connection that lasts longer is cut off
TEXT: Final = "text/plain; charset=utf-8"


class Exporter:
    """Serves the run's metrics in a thread until it is closed."""

    def __init__(
        self,
        host: str = LOOPBACK,
        port: int | None = None,
        *,
        info: Mapping[str, str] | None = None,
        token: str | None = None,
        max_series: int = MAX_SERIES,
        connection_seconds: float = CONNECTION_SECONDS,
    ) -> None:
        """Without a port, the first free one from 9400 on is used. `info` becomes the labels of
        m3pc_build_info. If `token` is given, /metrics requires it as a bearer token."""
        self._metrics = PublishedMetrics(info or {}, max_series=max_series)
        self._token, self._unready = token, "no metrics have been published yet"
        config = ServerConfig(
            self._respond,
            max_connections=MAX_CONNECTIONS + 1,  # uvicorn refuses the last one
            keep_alive=1,
            stop_seconds=1,
            connection_seconds=connection_seconds,
            log_level="error",
        )
        self._server = self._start(config, host, port)

    @property
    def address(self) -> str:
        return self._server.address

    def update(self, snapshot: Snapshot, *, unready: str = "") -> None:
        """Publish a snapshot; `unready` says why the run is not ready, "" if it is."""
        self._metrics.snapshot, self._unready = snapshot, unready

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, content = self._answer(scope)
        is_metrics = status == 200 and scope["path"] == "/metrics"
        headers = {
            "content-type": CONTENT_TYPE_PLAIN_0_0_4 if is_metrics else TEXT,
            "content-length": str(len(content)),
            "x-content-type-options": "nosniff",
            "connection": "close",
        }
        headers |= {"allow": "GET"} if status == 405 else {}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": content})

    def _answer(self, scope: Scope) -> tuple[int, bytes]:
        """Status and body."""
        headers, path = headers_of(scope), scope["path"]
        if refusal := _refusal(scope["method"], headers):
            return refusal
        if path == "/healthz":
            return 200, b"alive\n"
        if path == "/readyz":
            return (503, f"{self._unready}\n".encode()) if self._unready else (200, b"ready\n")
        if path != "/metrics":
            return 404, b"GET /metrics, /healthz or /readyz\n"
        if self._token is not None and not has_token(headers, self._token):
            return 401, b"a bearer token is needed\n"
        return 200, self._metrics.text()

    def _start(self, config: ServerConfig, host: str, port: int | None) -> BackgroundServer:
        """Listen at the given port, or at the first free one."""
        ports = range(PORT, PORT + PORTS) if port is None else [port]
        for candidate in ports:
            try:
                return BackgroundServer(config, host, candidate)
            except OSError as error:
                last = error
        raise OSError(last.errno, f"no metrics can be served at {host}:{ports[0]}: {last.strerror}")


def _refusal(method: str, headers: Mapping[str, str]) -> tuple[int, bytes] | None:
    if method != "GET":
        return 405, b"GET only\n"
    if not is_own_name(headers.get("host", "")):
        return 421, b"ask by an IP address, localhost or this machine's name\n"
    if is_cross_site(headers):
        return 403, b"not for pages of other sites\n"
    return None


class PublishedMetrics(Collector):
    """The newest snapshot in Prometheus' text format, with the metrics of this process.

    Counters and histograms start at 0; a gauge appears once it was set. Series beyond `max_series`
    are left out and counted in m3pc_exporter_dropped_series_total.
    """

    def __init__(self, info: Mapping[str, str], *, max_series: int = MAX_SERIES) -> None:
        self._info, self._max_series, self._dropped = dict(info), max_series, 0
        self.snapshot: Snapshot = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        room = self._max_series
        for metric in METRICS.values():
            if metric is DROPPED_SERIES:
                continue
            family = _family(metric, self.snapshot.get(metric.name, {}))
            if len(family.samples) > room:
                self._dropped += len(family.samples)
                continue
            room -= len(family.samples)
            if family.samples:
                yield family
        about = "Versions, and whether Ray asks for a token."
        build = GaugeMetricFamily("m3pc_build_info", about, labels=list(self._info))
        build.add_metric(list(self._info.values()), 1.0)
        yield build
        yield _family(DROPPED_SERIES, {"": [float(self._dropped)]})


def _family(metric: Metric, values: Mapping[str, list[float]]) -> Family:
    labels = [metric.label] if metric.label else []
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for label, series in _series(metric, values):
            histogram.add_metric(label, list(_buckets(metric, series)), sum_value=series[-1])
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for label, series in _series(metric, values):
        family.add_metric(label, series[0])
    return family


def _series(
    metric: Metric, values: Mapping[str, list[float]]
) -> Iterator[tuple[list[str], list[float]]]:
    """Label values and numbers of each series."""
    names = list(values)[:MAX_SLOTS] if metric.label == SLOT else metric.values or ("",)
    for name in names:
        series = values.get(name)
        if series is None and metric.kind == "gauge":
            continue
        yield [name] if metric.label else [], series or [0.0] * metric.width


def _buckets(metric: Metric, series: list[float]) -> Iterator[tuple[str, float]]:
    """Upper bound and cumulative count of each bucket."""
    total = 0.0
    for bound, count in zip((*map(str, metric.buckets), "+Inf"), series[:-1], strict=True):
        total += count
        yield bound, total
