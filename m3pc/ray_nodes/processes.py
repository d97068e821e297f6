"""Finds, signals and reaps processes of this machine, through Linux's /proc."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
POLL_SECONDS = 0.05
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that exactly its
    descendants can be found."""
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "orphans cannot be adopted")


def children() -> list[int]:
    """Living children of this process."""
    own = os.getpid()
    return [child for child, (state, parent) in _all().items() if parent == own and state != "Z"]


def descendants(pids: Iterable[int]) -> set[int]:
    """Living children, grandchildren and so on of `pids`."""
    below: dict[int, list[int]] = {}
    for pid, (state, parent) in _all().items():
        if state != "Z":
            below.setdefault(parent, []).append(pid)
    reached: set[int] = set()
    pending = list(pids)
    while pending:
        more = [pid for pid in below.get(pending.pop(), ()) if pid not in reached]
        reached.update(more)
        pending += more
    return reached


def command_of(pid: int) -> list[str]:
    words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    return [os.fsdecode(word) for word in words[:-1]]


def environment_of(pid: int) -> dict[str, str]:
    """The environment at the process's start, unless the process overwrote it with a new title."""
    entries = os.fsdecode((PROC / str(pid) / "environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def find_by_variable(variable: str, value: str) -> set[int]:
    """Processes that were started with a variable, and their descendants."""
    pids = set()
    for pid in _all():
        with suppress(OSError):  # the process ended, or belongs to another user
            if environment_of(pid).get(variable) == value:
                pids.add(pid)
    return pids | descendants(pids)


def send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def reap_children() -> dict[int, int]:
    """Exit codes of children that ended since the last call; minus the signal if killed."""
    codes = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def end_descendants(first: Iterable[int], patience: float) -> None:
    """End all descendants of this process: SIGTERM to `first`, SIGTERM to all, SIGKILL to all,
    with up to `patience` seconds after each."""
    own = [os.getpid()]
    for pids, number in (
        (set(first), signal.SIGTERM),
        (None, signal.SIGTERM),
        (None, signal.SIGKILL),
    ):
        send_signal(descendants(own) if pids is None else pids & descendants(own), number)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            reap_children()
            left = descendants(own)
            if not (left if pids is None else left & pids):
                break
            if number == signal.SIGKILL:
                send_signal(left, number)  # includes processes started meanwhile
            time.sleep(POLL_SECONDS)


def _all() -> dict[int, tuple[str, int]]:
    """State and parent of each process."""
    processes = {}
    for path in PROC.glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):  # it ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            processes[int(path.parent.name)] = state, int(parent)
    return processes
