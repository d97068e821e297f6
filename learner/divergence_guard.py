"""When updates that are not finite have become too many to be left out."""

from collections import deque
from collections.abc import Iterable

from m3pc.types import DivergedError

RUN_OF_BAD, WINDOW, SHARE = 10, 1000, 0.01
MOST_ROLLBACKS = 3


class DivergenceGuard:
    """Counts updates that were left out. Ten in a row, or more than 1 % of the last thousand, ask
    for a return to the last checkpoint; after three returns the run has diverged."""

    def __init__(self, bad: Iterable[int] = (), rollbacks: int = 0) -> None:
        self._bad = deque(bad)  # numbers of recent updates that were left out
        self.rollbacks = rollbacks

    def skipped(self, number: int) -> bool:
        """Update `number` was left out; whether to go back."""
        self._bad.append(number)
        while self._bad[0] <= number - WINDOW:
            self._bad.popleft()
        row = list(range(number - RUN_OF_BAD + 1, number + 1))
        return list(self._bad)[-RUN_OF_BAD:] == row or len(self._bad) > SHARE * WINDOW

    def rolled_back(self) -> None:
        if self.rollbacks == MOST_ROLLBACKS:
            raise DivergedError(
                f"updates were not finite again after {MOST_ROLLBACKS} returns to the last "
                "checkpoint: training diverged; go on with a lower online.lr or critic.lr"
            )
        self.rollbacks += 1
        self._bad.clear()

    @property
    def recent(self) -> list[int]:
        return list(self._bad)
