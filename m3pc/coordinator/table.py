"""The seam under a coordinator: sealed records by kind and name, changed by compare and swap."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from m3pc.types import CoordinatorUnavailableError

TableContents = Mapping[str, Mapping[str, str]]  # sealed records by name, by kind


class RecordsLostError(Exception):
    """The records are gone or unreadable: rebuild them."""

    def __init__(self, marker: str = "") -> None:
        super().__init__("the coordinator's records are lost")
        self.marker = marker  # as it was found; empty where there was none


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    marker: str
    now: int  # milliseconds; goes forwards only, also when the clock is set back
    texts: Mapping[str, str]  # by name


class Deadline:
    """Until when somebody waits for an answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def check(self, where: str, why: str, todo: str) -> None:
        if self.left <= 0:
            raise CoordinatorUnavailableError(
                f"{where} gave no answer within {self.seconds:g} s: {why}; {todo}"
            )


class Table(Protocol):
    """Every call raises CoordinatorUnavailableError at its deadline, and may be repeated."""

    where: str  # for messages: no password in it

    def snapshot(self, kind: str, name: str | None, deadline: Deadline) -> TableSnapshot:
        """One record, if there is one, or all of a kind. LostError without a marker."""

    def swap(
        self, kind: str, name: str, *, old: str | None, new: str, marker: str, deadline: Deadline
    ) -> bool:
        """False, and nothing changes, if record or marker are no longer as they were seen."""

    def rebuild(
        self,
        marker: str,
        make: Callable[[TableContents, int], tuple[str, TableContents]],
        deadline: Deadline,
    ) -> None:
        """Replace everything, if the marker is still the one that was found.

        `make` is given what is left and the time, and returns the new marker and records. No
        other rebuild runs meanwhile, nor any swap.
        """

    def close(self) -> None: ...


def ticked(clock: str, raw: int) -> tuple[int, str]:
    """The time, and what to remember of it: "last ahead", by which a clock set back is put right.

    >>> ticked("", 500)
    (500, '500 0')
    >>> ticked("500 0", 20)
    (500, '500 480')
    >>> ticked("500 480", 30)
    (510, '510 480')
    """
    found = re.fullmatch(r"([0-9]{1,15}) ([0-9]{1,15})", clock)  # else new, or damaged
    last, ahead = (int(found[1]), int(found[2])) if found else (raw, 0)
    ahead = max(ahead, last - raw)
    return raw + ahead, f"{raw + ahead} {ahead}"
