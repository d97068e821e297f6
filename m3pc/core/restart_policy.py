"""Decides when an ended process is restarted: at once, later or never."""

from collections import deque
from dataclasses import dataclass, field

from m3pc.core.backoff import Backoff

WINDOW_SECONDS, MAX_ENDS = 600.0, 5  # no restart after the fifth end within the window
BACKOFF = Backoff(first=1.0, longest=60.0)


@dataclass(slots=True)
class RestartPolicy:
    """Counts the ends of one process; times are by the supervisor's clock."""

    count: int = 0
    _ends: deque[float] = field(default_factory=deque)  # times within the window

    def record_end(self, now: float) -> float | None:
        """Returns when to restart a process that ended at `now`; None: never."""
        self.count += 1
        self._ends.append(now)
        while self._ends[0] <= now - WINDOW_SECONDS:
            self._ends.popleft()
        failures = len(self._ends)
        if failures >= MAX_ENDS:
            return None
        # Restart at once after a first end: its cause may have been a single event.
        return now if failures == 1 else now + BACKOFF.pause(failures)
