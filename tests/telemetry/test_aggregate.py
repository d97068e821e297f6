"""Metrics of a fleet: processes die, counts do not shrink."""

from m3pc.telemetry.aggregate import RunTotals
from m3pc.telemetry.catalogue import ENV_STEPS, QUEUE_ROWS
from m3pc.telemetry.recorder import Recorder, Snapshot, value


def said(steps: float, queue: float = 0) -> Snapshot:
    recorder = Recorder()
    recorder.add(ENV_STEPS, steps)
    recorder.set(QUEUE_ROWS, queue)
    return recorder.snapshot()


def test_processes_are_added_up() -> None:
    totals = RunTotals()
    totals.take("actor-0", 0, said(10, queue=1))
    totals.take("actor-1", 0, said(5, queue=2))
    assert value(totals.now(), ENV_STEPS) == 15
    assert value(totals.now(), QUEUE_ROWS) == 3


def test_the_same_words_twice_count_once() -> None:
    totals = RunTotals()
    for steps in (10, 10, 12):
        totals.take("actor-0", 0, said(steps))
    assert value(totals.now(), ENV_STEPS) == 12


def test_what_a_dead_process_counted_stays_and_what_it_measured_goes() -> None:
    totals = RunTotals()
    totals.take("actor-0", 0, said(10, queue=7))
    totals.take("actor-0", 1, said(0, queue=1))
    assert value(totals.now(), ENV_STEPS) == 10
    assert value(totals.now(), QUEUE_ROWS) == 1
    totals.take("actor-0", 1, said(4, queue=1))
    totals.ended("actor-0")
    assert value(totals.now(), ENV_STEPS) == 14
    assert QUEUE_ROWS.name not in totals.now()
