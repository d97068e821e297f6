"""Waiting for a condition, with a deadline."""

import time
from collections.abc import Callable

PATIENCE = 30.0  # seconds; far more than any condition needs


def eventually(condition: Callable[[], object], patience: float = PATIENCE) -> bool:
    """Whether the condition became true in time."""
    until = time.monotonic() + patience
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True
