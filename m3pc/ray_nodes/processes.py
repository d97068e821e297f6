"""Processes of this machine, as Linux shows them: whose they are, and how to end them."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
PAUSE = 0.05  # seconds between two looks
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def adopt_orphans() -> None:
    """From now on whatever is started below this process stays below it, also when the process in
    between ends: so all of it can be found, and nothing else."""
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "orphans cannot be adopted")


def children(pid: int | None = None) -> list[int]:
    """Of this process or another; those that ended and were not waited for are not among them."""
    mine = os.getpid() if pid is None else pid
    return [one for one, (state, parent) in _all().items() if parent == mine and state != "Z"]


def descendants(pids: Iterable[int]) -> set[int]:
    """All that live below these."""
    below: dict[int, list[int]] = {}
    for pid, (state, parent) in _all().items():
        if state != "Z":
            below.setdefault(parent, []).append(pid)
    found: set[int] = set()
    left = list(pids)
    while left:
        more = [pid for pid in below.get(left.pop(), ()) if pid not in found]
        found.update(more)
        left += more
    return found


def name(pid: int) -> str:
    """Of the program, cut to 15 letters; empty if there is no such process."""
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def command_of(pid: int) -> list[str]:
    words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    return [os.fsdecode(word) for word in words[:-1]]


def environment_of(pid: int) -> dict[str, str]:
    """That it was started with. A process that changes its title may have written over it."""
    entries = os.fsdecode((PROC / str(pid) / "environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def marked(variable: str, value: str) -> set[int]:
    """Those that were started with a variable, and all below them."""
    found = set()
    for pid in _all():
        with suppress(OSError):  # it ended meanwhile, or is another user's
            if environment_of(pid).get(variable) == value:
                found.add(pid)
    return found | descendants(found)


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def reap() -> dict[int, int]:
    """Children that ended since, with how: the exit code, or minus the signal."""
    found = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return found


def end_below(first: Iterable[int], patience: float) -> None:
    """All processes below this one: `first` are asked before the others, then all, then killed."""
    mine = [os.getpid()]
    for pids, number in (
        (set(first), signal.SIGTERM),
        (None, signal.SIGTERM),
        (None, signal.SIGKILL),
    ):
        send(descendants(mine) if pids is None else pids & descendants(mine), number)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            reap()
            left = descendants(mine)
            if not (left if pids is None else left & pids):
                break
            if number == signal.SIGKILL:
                send(left, number)  # also what they started meanwhile
            time.sleep(PAUSE)


def _all() -> dict[int, tuple[str, int]]:
    """State and parent of each process."""
    found = {}
    for path in PROC.glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):  # it ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            found[int(path.parent.name)] = state, int(parent)
    return found
