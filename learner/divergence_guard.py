"""Decides when too many updates were skipped because they were not finite."""

from collections import deque
from collections.abc import Iterable

from m3pc.types import DivergedError

MAX_IN_A_ROW, WINDOW, MAX_SHARE = 10, 1000, 0.01  # limits of skips: in a row, share of WINDOW
MAX_ROLLBACKS = 3


class DivergenceGuard:
    """Counts skipped updates. Ten in a row, or more than 1 % of the last thousand, call for a
    return to the last checkpoint; after three returns the run has diverged."""

    def __init__(self, skipped: Iterable[int] = (), rollbacks: int = 0) -> None:
        self._skipped = deque(skipped)  # numbers of recent updates
        self.rollbacks = rollbacks

    def skip(self, number: int) -> bool:
        """Count update `number` as skipped; True if the run must go back to the last checkpoint."""
        self._skipped.append(number)
        while self._skipped[0] <= number - WINDOW:
            self._skipped.popleft()
        in_a_row = list(range(number - MAX_IN_A_ROW + 1, number + 1))
        return self.recent[-MAX_IN_A_ROW:] == in_a_row or len(self._skipped) > MAX_SHARE * WINDOW

    def roll_back(self) -> None:
        """Count a return to the last checkpoint; DivergedError if it is one too many."""
        if self.rollbacks == MAX_ROLLBACKS:
            raise DivergedError(
                f"updates were not finite again after {MAX_ROLLBACKS} returns to the last "
                "checkpoint: training diverged; go on with a lower online.lr or critic.lr"
            )
        self.rollbacks += 1
        self._skipped.clear()

    @property
    def recent(self) -> list[int]:
        """Numbers of the updates skipped among the last thousand, for a checkpoint."""
        return list(self._skipped)
