"""Metrics like those of a run, of Ray and of a host, without any of them."""

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from m3pc.telemetry import catalogue
from m3pc.telemetry.exporter import Exporter
from m3pc.telemetry.recorder import Metric

DECLARED = [value for value in vars(catalogue).values() if isinstance(value, Metric)]
INFO = {"version": "0.0.0", "ray": "2.60.0", "auth": "token"}
# Bounds of gauges whose values have to look like those of a run.
RANGES = {
    "m3pc_run_part_parked": (0, 0),
    "m3pc_replay_disk_free_bytes": (8e10, 8e10),
    "m3pc_replay_bytes": (1e8, 3e8),
    "m3pc_replay_writer_blocked": (0, 0),
    "m3pc_replay_limiter_error": (-1, 40),
    "m3pc_learner_collected_ratio": (0.2, 0.4),
    "m3pc_learner_entropy": (-1.1, -0.7),
    "m3pc_learner_entropy_bound": (-1, -1),
    "m3pc_checkpoint_bytes": (4e6, 4e6),
}
STILL = ("faults", "failures", "rejected", "restarts", "scaled", "dropped", "nonfinite", "rollback",
         "passed_over", "torn", "out_of_memory")  # fmt: skip
BAD = ("fenced", "rejected", "late", "bad", "failed")
# As Ray 2.60 exposes them, without the labels that no dashboard uses.
RAY = """\
ray_node_cpu_utilization{ip="127.0.0.2"} 41.5
ray_node_mem_used{ip="127.0.0.2"} 3.1e9
ray_node_mem_total{ip="127.0.0.2"} 2.5e10
ray_node_disk_free{ip="127.0.0.2"} 8.1e10
ray_actors{Name="Rollout",Source="gcs",State="ALIVE"} 6
ray_actors{Name="Rollout",Source="gcs",State="DEAD"} 1
ray_actors{Name="Rollout",Source="executor",State="ALIVE_IDLE"} 6
ray_object_store_memory{Location="MMAP_SHM",ObjectState="SEALED"} 1.2e7
ray_object_store_memory{Location="SPILLED",ObjectState=""} 0
ray_component_rss_bytes{Component="raylet"} 6.2e7
ray_component_rss_bytes{Component="gcs"} 5.1e7
ray_io_context_event_loop_lag_ms{Name="gcs_server_main_io_context"} 0.2
ray_operation_count_total{Name="dropped"} 12
"""
NODE = """\
node_cpu_seconds_total{cpu="0",mode="idle"} 812.5
node_load1 1.2
node_memory_MemAvailable_bytes 2.1e10
node_memory_MemTotal_bytes 2.5e10
node_filesystem_avail_bytes{mountpoint="/",fstype="ext4",device="/dev/vda"} 8.1e10
node_disk_io_time_seconds_total{device="vda"} 55.1
node_network_receive_bytes_total{device="eth0"} 12345
node_network_transmit_bytes_total{device="eth0"} 54321
"""


class PretendRun:
    """Every metric with every label; each `advance` is a second of the run."""

    def __init__(self, *, slots: int = 4, seed: int = 0) -> None:
        self._random, self._slots, self.seconds = random.Random(seed), slots, 0
        self._totals: dict[str, dict[str, list[float]]] = {}
        self.quarantined = 0
        self.advance()

    def advance(self) -> dict[str, dict[str, list[float]]]:
        self.seconds += 1
        for metric in DECLARED:
            labels = metric.values or (map(str, range(self._slots)) if metric.label else ("",))
            series = self._totals.setdefault(metric.name, {})
            for label in labels:
                series[label] = self._next(metric, label, series.get(label))
        return self._totals

    def _next(self, metric: Metric, label: str, before: list[float] | None) -> list[float]:
        if metric.kind == "counter":
            still = any(word in metric.name for word in STILL) or label in BAD
            return [(before or [0.0])[0] + (0 if still else self._random.uniform(0, 0.3))]
        if metric.kind == "histogram":
            counts = list(before or [0.0] * (len(metric.buckets) + 2))
            for _ in range(5):
                value = self._random.choice(metric.buckets[: len(metric.buckets) // 2])
                counts[metric.buckets.index(value)] += 1
                counts[-1] += value
            return counts
        return [self._gauge(metric, label, (before or [math.nan])[0])]

    def _gauge(self, metric: Metric, label: str, before: float) -> float:
        fixed = {
            "m3pc_replay_segments": self.quarantined if label == "quarantined" else 3,
            "m3pc_run_phase": label == "collecting",
            "m3pc_run_steps_goal": 50_000,
            "m3pc_run_steps": 20 * self.seconds,
            "m3pc_run_part_up": 4 if label == "actor" else 1,
            "m3pc_run_part_wanted": 4 if label == "actor" else 1,
            "m3pc_actor_up": label != "2" or self.seconds % 60 < 45,
        }
        if metric.name in fixed:
            return float(fixed[metric.name])
        if "timestamp" in metric.name:
            return time.time() - self.seconds % 40
        low, high = RANGES.get(metric.name, (70.0, 100.0))
        start = (low + high) / 2 if math.isnan(before) else before
        return min(max(start + self._random.gauss(0, 0.05) * (high - low), low), high)


@contextmanager
def pretended(run: PretendRun) -> Iterator[dict[str, dict[str, str]]]:
    """Serve the metrics of the run, of a Ray node and of a host; the labels of each address."""
    end = threading.Event()
    with Exporter(port=0, info=INFO) as exporter, served(RAY) as ray, served(NODE) as node:

        def update() -> None:
            while not end.wait(1.0):
                exporter.update(run.advance())

        exporter.update(run.advance())
        thread = threading.Thread(target=update)
        thread.start()
        try:
            yield {
                exporter.address: {"job": "m3pc", "run": "hopper"},
                ray: {"job": "ray", "run": "hopper"},
                node: {"job": "node"},
            }
        finally:
            end.set()
            thread.join(10)


@contextmanager
def served(text: str) -> Iterator[str]:
    """An HTTP server that gives the same text to every request; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
