"""What the benchmark of served robots says of itself."""

import pytest

from benchmarks.serve import Load, exit_code, row


@pytest.mark.parametrize(
    ("clients", "missed", "code"), [(4, 0, 0), (4, 1, 1), (1, 1, 0), (16, 9, 0)]
)
def test_answers_that_four_robots_miss_are_a_finding(clients: int, missed: int, code: int) -> None:
    load = Load(address="", token="", clients=clients, seconds=1, deadline_ms=50, binary=True)
    found = row(load, [(60.0, 1.0, 8)] * missed + [(20.0, 1.0, 8)] * 10)
    assert (found.missed, exit_code([found])) == (missed, code)
