"""Metrics: declared here once, recorded in every process, added up by whoever drives the run.

A process keeps running totals and hands out whole snapshots: one that is lost or arrives twice
changes nothing. Totals of a process that ended stay with whoever adds up, so none ever shrinks.
"""

import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
# How gauges of several processes become one; a counter or a histogram is always a sum.
Reduce = Literal["sum", "max", "min"]
# By metric, then by label value ("" without one): [value], or of a histogram the observations in
# each bucket, those beyond the last, and the sum of all observed.
Snapshot = Mapping[str, Mapping[str, list[float]]]

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES: Final = tuple(float(2**n) for n in range(11))
UPDATES: Final = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()  # of the label: a closed set
    buckets: tuple[float, ...] = ()
    reduce: Reduce = "sum"

    def __post_init__(self) -> None:
        assert (self.kind == "counter") == self.name.endswith("_total"), self.name
        assert (self.kind == "histogram") == bool(self.buckets), self.name
        assert bool(self.label) == bool(self.values), self.name
        METRICS[self.name] = self


METRICS: dict[str, Metric] = {}

# Actors
ENV_STEPS = Metric(
    name="m3pc_actor_env_steps_total", kind="counter", help="Environment steps taken."
)
EPISODES = Metric(
    name="m3pc_actor_episodes_total",
    kind="counter",
    help="Episodes that ended.",
    label="outcome",
    values=("terminated", "truncated", "aborted"),
)
ENV_FAULTS = Metric(
    name="m3pc_actor_env_faults_total",
    kind="counter",
    help="Environments that misbehaved and were made anew.",
    label="reason",
    values=("nan", "crash", "timeout", "shape"),
)
UNACKED = Metric(
    name="m3pc_actor_unacked_episodes", kind="gauge", help="Episodes that wait for the store."
)
ACTOR_BLOCKED = Metric(
    name="m3pc_actor_blocked_seconds_total",
    kind="counter",
    help="Time in which an actor could not step its environments.",
    label="on",
    values=("planner", "replay", "stale"),
)
ACTOR_STEPPING = Metric(
    name="m3pc_actor_stepping_seconds_total", kind="counter", help="Time inside environments."
)
STALENESS = Metric(
    name="m3pc_actor_policy_staleness_updates",
    kind="histogram",
    help="Updates that the learner was ahead of an episode's policy, when it saw the episode.",
    buckets=UPDATES,
)
RESTARTS = Metric(
    name="m3pc_actor_restarts_total",
    kind="counter",
    help="Processes started again.",
    label="part",
    values=("actor", "planner", "store", "learner", "evaluator"),
)

# Planner
REQUESTS = Metric(
    name="m3pc_planner_requests_total",
    kind="counter",
    help="Requests answered.",
    label="result",
    values=("ok", "retry", "late", "bad", "failed"),
)
PLAN_SECONDS = Metric(
    name="m3pc_planner_request_duration_seconds",
    kind="histogram",
    help="Of requests: waiting in the queue, being computed, both.",
    label="stage",
    values=("queue", "compute", "total"),
    buckets=SECONDS,
)
BATCH_ROWS = Metric(
    name="m3pc_planner_batch_size",
    kind="histogram",
    help="Environments answered together.",
    buckets=SIZES,
)
QUEUE_ROWS = Metric(
    name="m3pc_planner_queue_depth", kind="gauge", help="Environments that wait for an answer."
)
PLANNER_VERSION = Metric(
    name="m3pc_planner_weights_version",
    kind="gauge",
    help="Updates behind the weights that answer.",
    reduce="min",
)
WEIGHTS_REJECTED = Metric(
    name="m3pc_planner_weights_rejected_total",
    kind="counter",
    help="Published weights that were not taken.",
    label="reason",
    values=("missing", "size", "hash", "format", "shape", "finite", "canary"),
)
PLANNER_IDLE = Metric(
    name="m3pc_planner_idle_seconds_total", kind="counter", help="Time without a request."
)
PLANNER_BUSY = Metric(
    name="m3pc_planner_busy_seconds_total", kind="counter", help="Time spent on batches."
)
OUT_OF_MEMORY = Metric(
    name="m3pc_planner_out_of_memory_total",
    kind="counter",
    help="Batches that did not fit into memory and were computed in parts.",
)

# Replay
APPENDS = Metric(
    name="m3pc_replay_append_total",
    kind="counter",
    help="Appends by what became of them.",
    label="result",
    values=("durable", "duplicate", "gap", "fenced", "rejected", "retry later"),
)
APPEND_SECONDS = Metric(
    name="m3pc_replay_append_duration_seconds",
    kind="histogram",
    help="Until an append was answered.",
    buckets=SECONDS,
)
INSERTED = Metric(
    name="m3pc_replay_inserted_transitions_total", kind="counter", help="Steps appended."
)
REPLAY_STEPS = Metric(name="m3pc_replay_transitions", kind="gauge", help="Steps in the store.")
REPLAY_BYTES = Metric(name="m3pc_replay_bytes", kind="gauge", help="Bytes of the store.")
DISK_FREE = Metric(
    name="m3pc_replay_disk_free_bytes", kind="gauge", help="Free beside the store.", reduce="min"
)
LIMITER_ERROR = Metric(
    name="m3pc_replay_limiter_error",
    kind="gauge",
    help="Updates owed by the learner; below 0: that it is ahead.",
)
WRITER_BLOCKED = Metric(
    name="m3pc_replay_writer_blocked", kind="gauge", help="1 while appends wait for the learner."
)

# Learner
UPDATES_DONE = Metric(
    name="m3pc_learner_updates_total", kind="counter", help="Updates of the trajectory model."
)
CRITIC_UPDATES = Metric(
    name="m3pc_learner_critic_updates_total", kind="counter", help="Updates of the critic."
)
UPDATE_SECONDS = Metric(
    name="m3pc_learner_update_duration_seconds",
    kind="histogram",
    help="Of one update of the model with the critic's that go with it.",
    buckets=SECONDS,
)
LEARNER_WAIT = Metric(
    name="m3pc_learner_wait_seconds_total",
    kind="counter",
    help="Time in which the learner could not work.",
    label="on",
    values=("limiter", "batch", "disk"),
)
LOSS = Metric(
    name="m3pc_learner_loss",
    kind="gauge",
    help="Losses of the last update.",
    label="name",
    values=("states", "actions", "rewards", "returns", "nll", "value_loss", "q_loss"),
)
COLLECTED_SHARE = Metric(
    name="m3pc_learner_collected_ratio",
    kind="gauge",
    help="Collected part of what the model learns from; the rest was logged.",
)
ENTROPY = Metric(name="m3pc_learner_entropy", kind="gauge", help="Entropy of the policy.")
ALPHA = Metric(name="m3pc_learner_alpha", kind="gauge", help="Multiplier of the entropy's bound.")
GRADIENT = Metric(name="m3pc_learner_grad_norm", kind="gauge", help="Before it is clipped.")
NONFINITE = Metric(
    name="m3pc_learner_nonfinite_updates_total",
    kind="counter",
    help="Updates left out: a loss or gradient was not finite.",
)
ROLLBACKS = Metric(
    name="m3pc_learner_rollbacks_total", kind="counter", help="Returns to the last checkpoint."
)
PUBLISHED = Metric(
    name="m3pc_learner_published_total",
    kind="counter",
    help="Versions offered.",
    label="result",
    values=("ok", "stale", "fenced", "unavailable"),
)
LAST_UPDATE = Metric(
    name="m3pc_learner_last_update_timestamp_seconds", kind="gauge", help="Of the last update.",
    reduce="max",
)  # fmt: skip
CHECKPOINT_SECONDS = Metric(
    name="m3pc_checkpoint_duration_seconds",
    kind="histogram",
    help="Of writing a checkpoint.",
    buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
COORDINATOR_DOWN = Metric(
    name="m3pc_coordinator_failures_total",
    kind="counter",
    help="Calls that the coordinator did not answer; the caller went on without.",
)


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
        return series.setdefault(label, [0.0] * _width(metric))


def _width(metric: Metric) -> int:
    return len(metric.buckets) + 2 if metric.kind == "histogram" else 1


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
