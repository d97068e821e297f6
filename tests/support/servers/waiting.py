"""Waits that end."""

import time
from collections.abc import Callable

PATIENCE = 30.0  # seconds; what is waited for here takes far less


def eventually(condition: Callable[[], object], patience: float = PATIENCE) -> bool:
    """Whether it came true in time."""
    until = time.monotonic() + patience
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True
