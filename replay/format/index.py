"""The index of a store summarises the events of its manifest."""

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
    """A segment consists of two files."""

    number: int
    steps: FileEntry
    episodes: FileEntry

    @property
    def bytes(self) -> int:
        return self.steps.bytes + self.episodes.bytes


class ProducerState(NamedTuple):
    """The newest incarnation of a slot and its next sequence number."""

    incarnation: int
    expected: int


class StoredTotals(NamedTuple):
    """Counts over all episodes ever stored, including dropped ones; each counts once."""

    episodes: int = 0
    steps: int = 0
    terminated: int = 0  # episodes
    truncated: int = 0  # episodes that were only truncated

    @property
    def aborted(self) -> int:
        return self.episodes - self.terminated - self.truncated

    def plus(self, other: "StoredTotals") -> "StoredTotals":
        return StoredTotals(*(mine + its for mine, its in zip(self, other, strict=True)))


NOTHING = StoredTotals()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndex:
    header: Header
    close: Close | None = None  # set in a finished data set
    rolls: int = 0  # how many logs became segments; also the number of the open log
    segments: tuple[SegmentEntry, ...] = ()
    producers: Mapping[int, ProducerState] = field(default_factory=dict)  # keyed by slot
    totals: StoredTotals = NOTHING  # without the open log
    refused: int = 0  # invalid episodes, without the open log
    dropped: tuple[int, ...] = ()
    quarantined: tuple[Quarantine, ...] = ()
    withdrawn: tuple[Withdraw, ...] = ()

    @property
    def removed_steps(self) -> int:
        """Steps in segments that were dropped or quarantined."""
        return self.totals.steps - sum(entry.steps.rows for entry in self.segments)


def index_of(events: Sequence[AnyEvent], path: Path) -> StoreIndex:
    """Compute the index. InputError: the events are incomplete or contradict each other."""
    match events:
        case [Header(event="open") as header, *seals, Close() as close] if seals and all(
            isinstance(seal, Seal) for seal in seals
        ):
            pairs = [(seal.steps, seal.episodes) for seal in seals if isinstance(seal, Seal)]
            segments = tuple(SegmentEntry(number, *pair) for number, pair in enumerate(pairs))
            return StoreIndex(header=header, close=close, segments=segments)
        case [Header(event="live"), *_]:
            return IndexBuilder(events, path).index()
    raise InputError(
        f"{path} is incomplete: expected a header, segments and a closing line, found "
        f"{[event.event for event in events][-3:]} at its end; make or import the data again"
    )


class IndexBuilder:
    """Builds the index of a live store, event by event."""

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
            case Roll(number=number) if number == self._rolls and _has_own_files(event):
                self._rolls, self._refused = number + 1, self._refused + event.refused
                self._producers |= {slot: ProducerState(*state) for slot, *state in event.producers}
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

    def index(self) -> StoreIndex:
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


def _has_own_files(roll: Roll) -> bool:
    """Whether the roll has no files, or two that are named after its number."""
    names = [entry and entry.name for entry in (roll.steps, roll.episodes)]
    number = f"{roll.number:06d}"
    return names in ([None, None], [f"{number}.steps.arrow", f"{number}.episodes.arrow"])
