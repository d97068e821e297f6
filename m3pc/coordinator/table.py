"""The storage interface of a coordinator: sealed records by kind and name, compare-and-swap."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from m3pc.types import CoordinatorUnavailableError

TableContents = Mapping[str, Mapping[str, str]]  # kind -> name -> sealed record


class RecordsLostError(Exception):
    """The records are gone or unreadable and have to be rebuilt."""

    def __init__(self, marker: str = "") -> None:
        super().__init__("the coordinator's records are lost")
        self.marker = marker  # the table's marker; empty if it is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """One record, and the marker of the table's generation at that time."""

    marker: str
    now: int  # milliseconds; never goes back, even when the clock is set back
    text: str | None  # the sealed record; None if there is no record


class Deadline:
    """The time by which a call has to end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds; negative once the deadline has passed."""
        return self._end - time.monotonic()

    def check(self, where: str, reason: str, advice: str) -> None:
        """Raise CoordinatorUnavailableError once the deadline has passed."""
        if self.remaining <= 0:
            raise CoordinatorUnavailableError(
                f"{where} gave no answer within {self.seconds:g} s: {reason}; {advice}"
            )


class Table(Protocol):
    """Every call raises CoordinatorUnavailableError at its deadline, and may be repeated."""

    where: str  # the address in messages, without a password

    def snapshot(self, kind: str, name: str, deadline: Deadline) -> TableSnapshot:
        """Read one record. Raises RecordsLostError if the marker is missing."""

    def swap(
        self, kind: str, name: str, *, old: str | None, new: str, marker: str, deadline: Deadline
    ) -> bool:
        """Write `new` if record and marker are still `old` and `marker`; otherwise return False."""

    def rebuild(
        self,
        marker: str,
        make: Callable[[TableContents, int], tuple[str, TableContents]],
        deadline: Deadline,
    ) -> None:
        """Replace all contents if the table's marker is still `marker`.

        `make` gets the remaining records and the time in milliseconds; it returns the new marker
        and records. No other rebuild and no swap runs meanwhile.
        """

    def close(self) -> None: ...


def advance_clock(clock: str, raw: int) -> tuple[int, str]:
    """Return the time and the text "last ahead" to store, which corrects a clock that was set back.

    >>> advance_clock("", 500)
    (500, '500 0')
    >>> advance_clock("500 0", 20)
    (500, '500 480')
    >>> advance_clock("500 480", 30)
    (510, '510 480')
    """
    stored = re.fullmatch(r"([0-9]{1,15}) ([0-9]{1,15})", clock)  # None: new or damaged
    last, ahead = (int(stored[1]), int(stored[2])) if stored else (raw, 0)
    ahead = max(ahead, last - raw)
    return raw + ahead, f"{raw + ahead} {ahead}"
