"""What a store holds, as the events of its manifest add up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from m3pc.types import InputError
from replay.format.manifest import (
    AnyEvent,
    Close,
    Drop,
    FileEntry,
    Header,
    Quarantine,
    Roll,
    Seal,
    Withdraw,
)


class SegmentEntry(NamedTuple):
    """A segment: its two files."""

    number: int
    steps: FileEntry
    episodes: FileEntry

    @property
    def bytes(self) -> int:
        return self.steps.bytes + self.episodes.bytes


class ProducerState(NamedTuple):
    """Where a slot stands."""

    incarnation: int
    expected: int  # its next sequence number


class StoredTotals(NamedTuple):
    """Episodes that were ever stored, each once, whatever became of them since."""

    episodes: int = 0
    steps: int = 0
    terminated: int = 0  # episodes
    truncated: int = 0  # and not terminated

    @property
    def aborted(self) -> int:
        return self.episodes - self.terminated - self.truncated

    def plus(self, other: "StoredTotals") -> "StoredTotals":
        return StoredTotals(*(mine + its for mine, its in zip(self, other, strict=True)))


NOTHING = StoredTotals()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndex:
    header: Header
    close: Close | None = None  # of a store that grows no more
    rolls: int = 0  # logs that became segments; the open one has this number
    segments: tuple[SegmentEntry, ...] = ()
    producers: Mapping[int, ProducerState] = field(default_factory=dict)  # by slot
    totals: StoredTotals = NOTHING  # of logs that became segments
    refused: int = 0  # episodes, in logs that became segments
    dropped: tuple[int, ...] = ()
    quarantined: tuple[Quarantine, ...] = ()
    withdrawn: tuple[Withdraw, ...] = ()

    @property
    def gone_steps(self) -> int:
        """Of live segments that were dropped or set aside."""
        return self.totals.steps - sum(listed.steps.rows for listed in self.segments)


def add_up(events: Sequence[AnyEvent], path: Path) -> StoreIndex:
    """InputError where the events make no sense together."""
    match events:
        case [Header(event="open") as header, *seals, Close() as close] if seals and all(
            isinstance(seal, Seal) for seal in seals
        ):
            pairs = [(seal.steps, seal.episodes) for seal in seals if isinstance(seal, Seal)]
            segments = tuple(SegmentEntry(number, *pair) for number, pair in enumerate(pairs))
            return StoreIndex(header=header, close=close, segments=segments)
        case [Header(event="live"), *_]:
            return IndexBuilder(events, path).listing()
    raise InputError(
        f"{path} is not whole: expected a header, segments and a closing line, found "
        f"{[event.event for event in events][-3:]} at its end; make or import the data again"
    )


class IndexBuilder:
    """A live store's listing, event by event."""

    def __init__(self, events: Sequence[AnyEvent], path: Path) -> None:
        assert isinstance(events[0], Header), "a manifest begins with a header"
        self._path, self._header = path, events[0]
        self._rolls = self._refused = 0
        self._totals = NOTHING
        self._segments: dict[int, SegmentEntry] = {}
        self._producers: dict[int, ProducerState] = {}
        self._dropped: list[int] = []
        self._quarantined: list[Quarantine] = []
        self._withdrawn: list[Withdraw] = []
        for event in events[1:]:
            self.add(event)

    def add(self, event: AnyEvent) -> None:
        match event:
            case Roll(number=number) if number == self._rolls and _named_by(event):
                self._rolls, self._refused = number + 1, self._refused + event.refused
                self._producers |= {slot: ProducerState(*where) for slot, *where in event.producers}
                if event.steps and event.episodes:
                    rows = event.episodes.rows, event.steps.rows
                    ended = event.terminated, event.truncated
                    self._totals = self._totals.plus(StoredTotals(*rows, *ended))
                    self._segments[number] = SegmentEntry(number, event.steps, event.episodes)
            case Drop(numbers=numbers) if self._segments.keys() >= set(numbers):
                self._dropped += [number for number in numbers if self._segments.pop(number)]
            case Quarantine(number=number) if number in self._segments:
                self._quarantined.append(event)
                del self._segments[number]
            case Withdraw():
                self._withdrawn.append(event)
            case _:
                raise InputError(
                    f"{self._path} lists {event.model_dump_json()[:200]}, which does not fit what "
                    f"comes before: {self._rolls} logs, segments {sorted(self._segments)[:20]}; "
                    "are these another store's lines?"
                )

    def listing(self) -> StoreIndex:
        return StoreIndex(
            header=self._header,
            rolls=self._rolls,
            segments=tuple(self._segments.values()),
            producers=dict(self._producers),
            totals=self._totals,
            refused=self._refused,
            dropped=tuple(self._dropped),
            quarantined=tuple(self._quarantined),
            withdrawn=tuple(self._withdrawn),
        )


def _named_by(roll: Roll) -> bool:
    """Whether its files bear its number; both are there or neither."""
    names = [entry and entry.name for entry in (roll.steps, roll.episodes)]
    number = f"{roll.number:06d}"
    return names in ([None, None], [f"{number}.steps.arrow", f"{number}.episodes.arrow"])
