"""When a process that ended is started again: at once, later, or not any more."""

from collections import deque
from dataclasses import dataclass, field

from m3pc.core.backoff import Backoff

WINDOW_SECONDS, MAX_ENDS = 600.0, 5  # the fifth end within the window is the last
BACKOFF = Backoff(first=1.0, longest=60.0)


@dataclass(slots=True)
class RestartPolicy:
    """Counts the ends of one process, by the clock of the supervisor that starts it."""

    count: int = 0
    _ends: deque[float] = field(default_factory=deque)  # within the window

    def record_end(self, now: float) -> float | None:
        """The process ended at `now`. Returns when to start it again; None: not any more."""
        self.count += 1
        self._ends.append(now)
        while self._ends[0] <= now - WINDOW_SECONDS:
            self._ends.popleft()
        failures = len(self._ends)
        if failures >= MAX_ENDS:
            return None
        # The first time at once: the cause may have been a single event.
        return now if failures == 1 else now + BACKOFF.pause(failures)
