"""When a process that ended is started again: at once, later, or not any more."""

from collections import deque
from dataclasses import dataclass, field

WITHIN, MOST = 600.0, 5  # seconds, ends
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds


@dataclass(slots=True)
class RestartPolicy:
    """The ends of one process, by the clock of whoever starts it."""

    _ends: deque[float] = field(default_factory=deque)
    count: int = 0

    def ended(self, now: float) -> float | None:
        """It ended at `now`: when to start it again; None after too many ends in a short time."""
        self.count += 1
        self._ends.append(now)
        while self._ends[0] <= now - WITHIN:
            self._ends.popleft()
        if len(self._ends) >= MOST:
            return None
        pause = FIRST_PAUSE * 2 ** (len(self._ends) - 1)
        # The first time at once: whatever it was may be over.
        return now if len(self._ends) == 1 else now + min(pause, LONGEST_PAUSE)
