"""A disk without room, for a file that is open."""

import os
from typing import IO


def fill_disk(file: IO[str]) -> None:
    """Every further write to this file fails with `No space left`. Needs Linux's /dev/full."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)
