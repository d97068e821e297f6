"""Metrics of all processes of a run: when a process ends, counts do not shrink."""

from m3pc.telemetry.aggregate import RunTotals
from m3pc.telemetry.catalogue import ENV_STEPS, QUEUE_ROWS
from m3pc.telemetry.recorder import Recorder, Snapshot, value


def recorded(steps: float, queue: float = 0) -> Snapshot:
    recorder = Recorder()
    recorder.add(ENV_STEPS, steps)
    recorder.set(QUEUE_ROWS, queue)
    return recorder.snapshot()


def test_processes_are_added_up() -> None:
    totals = RunTotals()
    totals.update("actor-0", 0, recorded(10, queue=1))
    totals.update("actor-1", 0, recorded(5, queue=2))
    assert value(totals.snapshot(), ENV_STEPS) == 15
    assert value(totals.snapshot(), QUEUE_ROWS) == 3


def test_a_repeated_snapshot_counts_once() -> None:
    totals = RunTotals()
    for steps in (10, 10, 12):
        totals.update("actor-0", 0, recorded(steps))
    assert value(totals.snapshot(), ENV_STEPS) == 12


def test_the_counts_of_an_ended_process_stay_and_its_gauges_disappear() -> None:
    totals = RunTotals()
    totals.update("actor-0", 0, recorded(10, queue=7))
    totals.update("actor-0", 1, recorded(0, queue=1))
    assert value(totals.snapshot(), ENV_STEPS) == 10
    assert value(totals.snapshot(), QUEUE_ROWS) == 1
    totals.update("actor-0", 1, recorded(4, queue=1))
    totals.remove("actor-0")
    assert value(totals.snapshot(), ENV_STEPS) == 14
    assert QUEUE_ROWS.name not in totals.snapshot()
