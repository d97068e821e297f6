"""A lock on a run's folder: only one process works on a run at a time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m3pc.types import InputError

PAUSES = (0.0, 0.05, 0.1)  # seconds before each attempt: a status query holds the lock for less


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock during the block. It is released even if the process is killed."""
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"{run} is not a run: {error.strerror}; give the folder of one") from None
    try:
        if not any(_acquired(descriptor, pause) for pause in PAUSES):
            raise InputError(f"{run} is being worked on by another process; wait for it")
        yield
    finally:
        os.close(descriptor)


def _acquired(descriptor: int, pause: float) -> bool:
    time.sleep(pause)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
