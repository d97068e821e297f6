"""Temporary handlers for SIGTERM and SIGINT."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call the handler on SIGTERM and SIGINT while the block runs."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)
