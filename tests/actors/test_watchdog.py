"""Calls that never come back end the process; waiting for others does not."""

import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from actors.watchdog import EnvWatchdog
from m3pc.core.exit_codes import INTERNAL
from m3pc.types import Episode
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.episodes.shared_data import ROOT
from tests.support.faults.live_writer import HEADER, ROOMY
from tests.support.servers.waiting import eventually


def left_by(folder: Path, hang: str) -> tuple[int, str, list[Episode]]:
    """Exit code, stderr and what a process stored in which an environment hung in its 3rd step,
    or at the `end`."""
    command = [sys.executable, "-m", "tests.support.children.hang_child", str(folder), hang]
    ended = subprocess.run(
        command, cwd=ROOT, timeout=50, capture_output=True, text=True, check=False
    )
    Writer(folder / "store", HEADER, ROOMY).close()
    return ended.returncode, ended.stderr, list(Store(folder / "store").episodes())


@pytest.mark.parametrize("hang", ["sleep", "close"])  # in the step, or after it raised
def test_a_step_that_hangs_ends_the_process_after_all_episodes_are_stored(
    hang: str, tmp_path: Path
) -> None:
    code, log, stored = left_by(tmp_path, hang)
    assert code == INTERNAL
    assert "event=env-hung env=0" in log and "faulty_env.py" in log
    assert sorted(int(episode.states[0, 0]) for episode in stored) == [0, 1, 2, 3]
    assert [len(episode) for episode in stored] == [2] * 4
    assert not any(episode.terminated or episode.truncated for episode in stored)


def test_a_step_that_keeps_the_lock_of_python_ends_the_process(tmp_path: Path) -> None:
    code, log, _ = left_by(tmp_path, "gil")
    assert code == 1
    assert "Timeout" in log and "faulty_env.py" in log
    assert "event=env-hung" not in log


def test_an_environment_that_cannot_be_closed_does_not_keep_a_drained_process(
    tmp_path: Path,
) -> None:
    code, log, stored = left_by(tmp_path, "end")
    assert code == INTERNAL
    assert "event=drained left=0" in log and "event=env-hung env=0" in log
    assert {int(episode.states[0, 0]) for episode in stored} == {0, 1, 2, 3}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_between_calls_is_not_counted() -> None:
    clock, exits, saved = Clock(), list[int](), list[int]()
    watchdog = EnvWatchdog(
        0.02,
        lambda slot, seconds: saved.append(slot),
        grace=60.0,
        clock=clock,
        end=exits.append,
    )
    with closing(watchdog):
        watchdog.start()
        watchdog.arm(1)
        watchdog.disarm()
        clock.now += 100
        assert not threading.Event().wait(0.1)  # some twenty polls
        watchdog.arm(1)
        watchdog.arm(2)
        assert (exits, saved) == ([], [])
        clock.now += 100
        assert eventually(lambda: exits)
    assert (exits, saved) == ([INTERNAL], [2])


def test_saving_that_hangs_too_does_not_keep_the_process() -> None:
    clock, exits, forever = Clock(), list[int](), threading.Event()
    watchdog = EnvWatchdog(
        0.02,
        lambda slot, seconds: forever.wait(30),
        grace=60.0,
        clock=clock,
        end=exits.append,
    )
    with closing(watchdog):
        watchdog.start()
        watchdog.arm(0)
        clock.now += 100
        assert eventually(lambda: exits)
        assert exits == [INTERNAL] and not forever.is_set()
        forever.set()
