"""A call that takes too long ends the process; one that ends in time does not."""

import subprocess
import sys
import threading
from contextlib import AbstractContextManager, closing

from m3pc.core.exit_codes import INTERNAL
from m3pc.core.watchdog import Watchdog
from tests.support.episodes.shared_data import ROOT
from tests.support.servers.waiting import eventually


class Watched:
    """A watchdog of a call whose duration the test sets."""

    def __init__(self, lock: AbstractContextManager[object] | None = None) -> None:
        self.busy_for = 0.0
        self.hangs, self.exits = list[float](), list[int]()
        self.watchdog = Watchdog(
            lambda: self.busy_for,
            1.0,
            on_hang=self.hangs.append,
            poll_seconds=0.005,
            deadlock_seconds=60.0,
            lock=lock,
            end=self.exits.append,
        )


def test_a_call_beyond_the_limit_is_reported_and_ends_the_process() -> None:
    watched = Watched()
    with closing(watched.watchdog):
        watched.watchdog.start()
        watched.busy_for = 1.0  # the limit itself is allowed
        assert not eventually(lambda: watched.exits, patience=0.1)
        watched.busy_for = 1.5
        assert eventually(lambda: watched.exits)
    assert (watched.hangs, watched.exits) == ([1.5], [INTERNAL])


def test_a_watchdog_that_was_closed_ends_nothing() -> None:
    watched = Watched()
    watched.watchdog.start()
    watched.watchdog.close()
    watched.busy_for = 9.0
    assert not eventually(lambda: watched.exits, patience=0.1)


def test_the_check_and_the_end_hold_the_lock() -> None:
    lock = threading.Lock()
    watched = Watched(lock)
    watched.busy_for = 9.0
    with closing(watched.watchdog):
        with lock:
            watched.watchdog.start()
            assert not eventually(lambda: watched.exits, patience=0.1)
            watched.busy_for = 0.0  # the call came back while the watchdog waited for the lock
        assert not eventually(lambda: watched.exits, patience=0.1)


def test_a_process_that_keeps_the_interpreters_lock_is_ended_by_the_timer_in_c() -> None:
    script = (
        "import ctypes\n"
        "from m3pc.core.watchdog import Watchdog\n"
        "times = {'poll_seconds': 0.1, 'deadlock_seconds': 0.5}\n"
        "Watchdog(lambda: 0.0, 1.0, on_hang=print, **times).start()\n"
        "ctypes.PyDLL(None).sleep(30)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=20, capture_output=True, check=False
    )
    assert ended.returncode == 1
    assert b"Timeout" in ended.stderr
