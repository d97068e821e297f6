"""Metrics: what a process records, and how snapshots of several processes are merged."""

import math

import pytest

from m3pc.telemetry.catalogue import (
    APPENDS,
    BATCH_ROWS,
    ENV_STEPS,
    PLANNER_VERSION,
    QUEUE_ROWS,
    STALENESS,
)
from m3pc.telemetry.recorder import (
    METRICS,
    Metric,
    Recorder,
    mean,
    merge,
    quantile,
    share_above,
    value,
)


def test_totals_of_several_processes_add_up() -> None:
    first, second = Recorder(), Recorder()
    for recorder, steps, version in ((first, 3, 20), (second, 4, 10)):
        recorder.add(ENV_STEPS, steps)
        recorder.set(QUEUE_ROWS, steps)
        recorder.set(PLANNER_VERSION, version)
    total = merge([first.snapshot(), second.snapshot()])
    assert value(total, ENV_STEPS) == 7
    assert value(total, QUEUE_ROWS) == 7
    assert value(total, PLANNER_VERSION) == 10  # the oldest in use


def test_a_snapshot_does_not_change_afterwards() -> None:
    recorder = Recorder()
    recorder.add(ENV_STEPS)
    before = recorder.snapshot()
    recorder.add(ENV_STEPS)
    assert value(before, ENV_STEPS) == 1


def test_a_quantile_lies_in_its_bucket() -> None:
    recorder = Recorder()
    for size in (1, 1, 1, 3):  # buckets end at 1, 2, 4
        recorder.observe(BATCH_ROWS, size)
    snapshot = recorder.snapshot()
    assert quantile(snapshot, BATCH_ROWS, 0.5) <= 1
    assert 2 < quantile(snapshot, BATCH_ROWS, 0.99) <= 4
    assert mean(snapshot, BATCH_ROWS) == 1.5


def test_without_observations_there_is_no_quantile() -> None:
    assert math.isnan(quantile({}, BATCH_ROWS, 0.5))
    assert math.isnan(mean({}, BATCH_ROWS))
    assert value({}, ENV_STEPS) == 0
    assert math.isnan(value({}, QUEUE_ROWS))


def test_a_quantile_beyond_the_last_bucket_is_its_upper_end() -> None:
    recorder = Recorder()
    recorder.observe(BATCH_ROWS, 1e9)
    assert quantile(recorder.snapshot(), BATCH_ROWS, 0.5) == BATCH_ROWS.buckets[-1]


def test_an_unknown_label_or_the_wrong_kind_is_a_bug() -> None:
    recorder = Recorder()
    with pytest.raises(AssertionError):
        recorder.add(APPENDS, label="lost")
    with pytest.raises(AssertionError):
        recorder.add(QUEUE_ROWS)
    with pytest.raises(AssertionError):
        Metric(name="m3pc_counts", kind="counter", help="No _total.")


def test_metrics_of_another_version_are_left_out() -> None:
    assert merge([{"m3pc_unknown_total": {"": [1.0]}}]) == {}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_every_metric_is_named_and_explained(metric: Metric) -> None:
    assert metric.name.startswith("m3pc_")
    assert metric.help.endswith(".")
    assert list(metric.buckets) == sorted(metric.buckets)
    assert len(metric.buckets) <= 14


def test_the_share_above_a_bound_is_that_of_the_buckets_that_end_above_it() -> None:
    recorder = Recorder()
    for age in (0, 5, 500, 501, 10**6):
        recorder.observe(STALENESS, age)
    snapshot = recorder.snapshot()
    assert share_above(snapshot, STALENESS, 500) == pytest.approx(2 / 5)
    assert share_above(snapshot, STALENESS, 5000) == pytest.approx(1 / 5)
    assert math.isnan(share_above({}, STALENESS, 500))
