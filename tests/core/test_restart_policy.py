"""How long a process that keeps ending is waited for."""

from m3pc.core.restart_policy import RestartPolicy


def test_the_first_restart_is_immediate_and_later_ones_wait_longer_each_time() -> None:
    restarts = RestartPolicy()
    assert [restarts.record_end(now) for now in (0.0, 10.0, 20.0, 30.0)] == [0.0, 12.0, 24.0, 38.0]


def test_five_ends_in_ten_minutes_are_too_many() -> None:
    restarts = RestartPolicy()
    assert [restarts.record_end(100.0 * n) is None for n in range(5)] == [False] * 4 + [True]


def test_rare_ends_are_forgotten() -> None:
    restarts = RestartPolicy()
    assert [restarts.record_end(1000.0 * n) for n in range(20)] == [1000.0 * n for n in range(20)]
    assert restarts.count == 20
