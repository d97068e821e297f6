"""One process at a time works on a run."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m3pc.types import InputError


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """For as long as the block runs; the lock ends with its process, however that ends."""
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"{run} is not a run: {error.strerror}; give the folder of one") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{run} is being worked on by another process; wait for it") from None
        yield
    finally:
        os.close(descriptor)
