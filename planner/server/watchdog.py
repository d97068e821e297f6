"""Ends a planner process whose current batch hangs; its supervisor starts another."""

import logging
from collections.abc import Callable

from m3pc.core.watchdog import Watchdog

log = logging.getLogger(__name__)

LIMIT = 30.0  # seconds for one batch


def batch_watchdog(
    stuck_for: Callable[[], float],
    limit: float = LIMIT,
    *,
    end: Callable[[int], object] | None = None,
) -> Watchdog:
    """A watchdog of the current batch, which has taken `stuck_for()` of `limit` seconds so far."""

    def on_hang(seconds: float) -> None:
        log.error("event=planner-stuck seconds=%.1f limit_s=%g", seconds, limit)

    return Watchdog(
        stuck_for,
        limit,
        on_hang=on_hang,
        poll_seconds=limit / 10,
        deadlock_seconds=2 * limit,
        end=end,
    )
