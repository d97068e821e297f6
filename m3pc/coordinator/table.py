"""The storage interface of a coordinator: sealed records by kind and name, compare-and-swap."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from m3pc.types import CoordinatorUnavailableError

TableContents = Mapping[str, Mapping[str, str]]  # sealed records by name, by kind


class RecordsLostError(Exception):
    """The records are gone or unreadable and have to be rebuilt."""

    def __init__(self, marker: str = "") -> None:
        super().__init__("the coordinator's records are lost")
        self.marker = marker  # as the table has it; empty if it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """One record, together with the marker that says which generation of the table it is from."""

    marker: str
    now: int  # milliseconds; never goes back, even when the clock is set back
    text: str | None  # the sealed record; None where there is none


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
        """CoordinatorUnavailableError once the deadline has passed."""
        if self.remaining <= 0:
            raise CoordinatorUnavailableError(
                f"{where} gave no answer within {self.seconds:g} s: {reason}; {advice}"
            )


class Table(Protocol):
    """Every call raises CoordinatorUnavailableError at its deadline, and may be repeated."""

    where: str  # for messages: without a password

    def snapshot(self, kind: str, name: str, deadline: Deadline) -> TableSnapshot:
        """One record. RecordsLostError where the marker is missing."""

    def swap(
        self, kind: str, name: str, *, old: str | None, new: str, marker: str, deadline: Deadline
    ) -> bool:
        """Write a record. False, and nothing changes, if record or marker are not as given."""

    def rebuild(
        self,
        marker: str,
        make: Callable[[TableContents, int], tuple[str, TableContents]],
        deadline: Deadline,
    ) -> None:
        """Replace everything, if the table's marker is still this one.

        `make` gets what remains and the time, and returns the new marker and records. No other
        rebuild and no swap runs meanwhile.
        """

    def close(self) -> None: ...


def advance_clock(clock: str, raw: int) -> tuple[int, str]:
    """The time, and what to store of it: "last ahead", which corrects a clock that was set back.

    >>> advance_clock("", 500)
    (500, '500 0')
    >>> advance_clock("500 0", 20)
    (500, '500 480')
    >>> advance_clock("500 480", 30)
    (510, '510 480')
    """
    stored = re.fullmatch(r"([0-9]{1,15}) ([0-9]{1,15})", clock)  # else new, or damaged
    last, ahead = (int(stored[1]), int(stored[2])) if stored else (raw, 0)
    ahead = max(ahead, last - raw)
    return raw + ahead, f"{raw + ahead} {ahead}"
