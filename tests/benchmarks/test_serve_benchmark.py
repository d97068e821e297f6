"""The exit code of the benchmark of served robots."""

import pytest

from benchmarks.serve import Load, exit_code, row


@pytest.mark.parametrize(
    ("clients", "missed", "code"), [(4, 0, 0), (4, 1, 1), (1, 1, 0), (16, 9, 0)]
)
def test_answers_missed_by_four_robots_are_a_failure(clients: int, missed: int, code: int) -> None:
    load = Load(address="", token="", clients=clients, seconds=1, deadline_ms=50, binary=True)
    result = row(load, [(60.0, 1.0, 8)] * missed + [(20.0, 1.0, 8)] * 10)
    assert (result.missed, exit_code([result])) == (missed, code)
