"""The coordinator over any table: looks at a record, applies a rule, swaps it, or looks again.

No number is given out twice, though a table may lose everything and the disk know less than was
given out: each rebuild takes a new generation from the disk, and every number given out after it
has the generation in its high bits, so it is above all that any earlier generation gave. What is
still known (on disk, in the table, by this client) joins by maximum, and a client that finds a
record older than it remembers raises it, so nobody sees a version go back.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from m3pc.coordinator import rules
from m3pc.coordinator.generations import next_generation
from m3pc.coordinator.records import (
    KINDS,
    LEASES,
    MARKER,
    POINTERS,
    SLOTS,
    DamagedRecordError,
    Hold,
    PointerRecord,
    R,
    Record,
    RecordType,
    RunMarker,
    SlotRecord,
)
from m3pc.coordinator.table import Deadline, RecordsLostError, Table, TableContents, TableSnapshot
from m3pc.types import (
    CoordinatorUnavailableError,
    InputError,
    Lease,
    Member,
    Pointer,
    Published,
    RecoveredState,
    Version,
)

log = logging.getLogger(__name__)

LONGEST_TEXT = 1024  # characters of a path or holder
LARGEST_SLOT = 1 << 31
REBUILDS = 5  # in one call; more means that somebody destroys what we write
LONGEST_WAIT = 86_400.0  # seconds
POLL = 0.1  # seconds between two looks of a watch
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

A = TypeVar("A")
Rule = Callable[[R, int, int], tuple[R, A]]  # record, base, now -> record, answer
Records = dict[tuple[str, str], Record]  # by kind and name


class TableCoordinator:
    """A Coordinator. Threads may share it; processes make their own."""

    def __init__(
        self,
        table: Table,
        *,
        generations: Path,
        floor: Callable[[], RecoveredState] = RecoveredState,
        deadline: float = 5.0,
    ) -> None:
        """`generations` is a folder that all who share the table see; `floor` reads the disk."""
        self._table, self._generations, self._floor = table, generations, floor
        self._seconds = _finite("deadline", deadline)
        self._seen: Records = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Keeper({self._table.where})"

    def register(self, slot: int) -> int:
        return self._change(SLOTS, _slot(slot), rules.register)

    def heartbeat(self, slot: int, incarnation: int) -> bool:
        return self._change(
            SLOTS,
            _slot(slot),
            lambda record, base, now: rules.heartbeat(record, incarnation, base, now),
        )

    def members(self) -> list[Member]:
        look = self._snapshot(SLOTS, None, Deadline(self._seconds))
        with self._lock:
            seen = {name for kind, name in self._seen if kind == SLOTS.name}
        members = []
        for name in sorted(seen | look.texts.keys(), key=int):
            slot = SLOTS.open(name, look.texts.get(name))
            if self._known(SLOTS, name, slot) != slot:
                slot = self._change(SLOTS, name, _keep)
            self._remember(SLOTS, name, slot)
            age = max(0, look.now - slot.beat) / 1000
            members.append(Member(slot=int(name), incarnation=slot.incarnation, age=age))
        return members

    def lease(self, name: str, holder: str, seconds: float) -> Lease | None:
        holder, length = _text("holder", holder), _milliseconds(seconds)
        fencing = self._change(
            LEASES,
            _name(name),
            lambda record, base, now: rules.grant(record, holder, length, base, now),
        )
        if fencing is None:
            return None
        return Lease(name=name, holder=holder, fencing=fencing, seconds=seconds)

    def renew(self, lease: Lease) -> Lease | None:
        length = _milliseconds(lease.seconds)
        renewed = self._change(
            LEASES,
            _name(lease.name),
            lambda record, base, now: rules.renew(record, lease, length, base, now),
        )
        return lease if renewed else None

    def release(self, lease: Lease) -> None:
        self._change(
            LEASES,
            _name(lease.name),
            lambda record, base, now: (rules.release(record, lease, base, now), None),
        )

    def new_epoch(self, name: str) -> int:
        return self._change(
            POINTERS, _name(name), lambda record, base, now: rules.new_epoch(record, base)
        )

    def publish(self, name: str, pointer: Pointer) -> Published:
        _check_pointer(pointer)
        return self._change(
            POINTERS, _name(name), lambda record, base, now: rules.publish(record, pointer, base)
        )

    def read(self, name: str) -> Pointer | None:
        return self._change(POINTERS, _name(name), _keep).pointer

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None:
        deadline = Deadline(_finite("timeout", timeout, least=0))
        while True:
            pointer = self.read(name)
            if pointer and (since is None or pointer.version > since):
                return pointer
            if deadline.left <= 0:
                return None
            time.sleep(min(POLL, deadline.left))

    def close(self) -> None:
        self._table.close()

    def _change(self, kind: RecordType[R], name: str, rule: Rule[R, A]) -> A:
        """Apply a rule to the record as it is and as we remember it; write what is new."""
        deadline = Deadline(self._seconds)
        while True:
            look = self._snapshot(kind, name, deadline)
            text = look.texts.get(name)
            found = kind.open(name, text)
            base = MARKER.open("", look.marker).generation << kind.record.bits
            new, answer = rule(self._known(kind, name, found), base, look.now)
            if new == found or self._table.swap(
                kind.name,
                name,
                old=text,
                new=kind.seal(name, new),
                marker=look.marker,
                deadline=deadline,
            ):
                self._remember(kind, name, new)
                return answer
            deadline.check(
                self._table.where,
                f"others changed {kind.name} {name} each time",
                "try again, or give a longer deadline",
            )

    def _known(self, kind: RecordType[R], name: str, found: R) -> R:
        with self._lock:
            seen = self._seen.get((kind.name, name))
        return found.join(seen) if isinstance(seen, kind.record) else found

    def _remember(self, kind: RecordType[R], name: str, record: R) -> None:
        with self._lock:
            seen = self._seen.get((kind.name, name))
            joined = record.join(seen) if isinstance(seen, kind.record) else record
            self._seen[kind.name, name] = joined

    def _snapshot(self, kind: RecordType[R], name: str | None, deadline: Deadline) -> TableSnapshot:
        """What the table holds, readable; rebuilt first where it is not."""
        for _ in range(REBUILDS):
            try:
                look = self._table.snapshot(kind.name, name, deadline)
                MARKER.open("", look.marker)
                for each, text in look.texts.items():
                    kind.open(each, text)
                return look
            except RecordsLostError as lost:
                marker, reason = lost.marker, "the records are gone"
            except DamagedRecordError as damage:
                marker, reason = look.marker, str(damage)
            self._rebuild(marker, reason, deadline)
        raise CoordinatorUnavailableError(
            f"{self._table.where} was rebuilt {REBUILDS} times and lost again: somebody else "
            "writes there; give this run a place of its own"
        )

    def _rebuild(self, marker: str, reason: str, deadline: Deadline) -> None:
        def make(found: TableContents, now: int) -> tuple[str, TableContents]:
            records = join(_readable(found), _from_floor(self._floor()))
            with self._lock:
                records = join(records, self._seen)
            least = max(map(_unused_generation, records.values()), default=0)
            generation = next_generation(self._generations, least)
            log.log(
                logging.WARNING if generation else logging.INFO,  # the first is no loss
                "event=coordinator-rebuilt where=%s generation=%d records=%d reason=%r",
                self._table.where,
                generation,
                len(records),
                reason,
            )
            return MARKER.seal("", RunMarker(generation=generation)), _sealed(records, now)

        self._table.rebuild(marker, make, deadline)


def join(a: Records, b: Records) -> Records:
    return a | {key: record.join(a[key]) if key in a else record for key, record in b.items()}


def _readable(found: TableContents) -> Records:
    """What can still be read of a table that somebody damaged."""
    records: Records = {}
    for kind, texts in found.items():
        for name, text in texts.items():
            try:
                records[kind, name] = KINDS[kind].open(name, text)
            except DamagedRecordError as damage:
                log.warning("event=coordinator-record-dropped reason=%r", str(damage))
    return records


def _from_floor(floor: RecoveredState) -> Records:
    slots = {
        str(slot): SlotRecord(incarnation=number) for slot, number in floor.incarnations.items()
    }
    leases = {name: Hold(fencing=number) for name, number in floor.fencings.items()}
    tracks = {name: PointerRecord(epoch=number) for name, number in floor.epochs.items()}
    for name, pointer in floor.pointers.items():
        track = PointerRecord(epoch=pointer.version.epoch, pointer=pointer)
        tracks[name] = track.join(tracks.get(name, track))
    return (
        {(SLOTS.name, name): slot for name, slot in slots.items()}
        | {(LEASES.name, name): hold for name, hold in leases.items()}
        | {(POINTERS.name, name): track for name, track in tracks.items()}
    )


def _unused_generation(record: Record) -> int:
    return (record.number >> record.bits) + 1 if record.number else 0


def _sealed(records: Records, now: int) -> TableContents:
    """As a new table, with times of its clock: silence counts from now on."""
    contents: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for (kind, name), record in records.items():
        contents[kind][name] = KINDS[kind].seal(name, _restamped(record, now))
    return contents


def _restamped(record: Record, now: int) -> Record:
    match record:
        case SlotRecord():
            return record.model_copy(update={"beat": now})
        case Hold():
            return record.model_copy(update={"since": min(record.since, now)})
    return record


def _keep(record: R, base: int, now: int) -> tuple[R, R]:
    return record, record


def _slot(slot: int) -> str:
    if not 0 <= slot < LARGEST_SLOT:
        raise InputError(f"slot is {slot}; give a number from 0 to {LARGEST_SLOT - 1}")
    return str(slot)


def _name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InputError(
            f"name is {name[:80]!r}; give 1 to 64 letters, digits, dots, hyphens or underscores"
        )
    return name


def _text(what: str, text: str) -> str:
    if not 0 < len(text) <= LONGEST_TEXT or not text.isprintable():
        raise InputError(
            f"{what} is {text[:80]!r}; give 1 to {LONGEST_TEXT} characters that can be printed"
        )
    return text


def _check_pointer(pointer: Pointer) -> None:
    _text("path", pointer.path)
    if not re.fullmatch("[0-9a-f]{64}", pointer.sha256):
        raise InputError(f"sha256 is {pointer.sha256[:80]!r}; give its 64 hexadecimal digits")
    for what, number in (("number", pointer.version.number), ("size", pointer.size)):
        if not 0 <= number < 1 << 63:
            raise InputError(f"{what} is {number}; give a number from 0 to 2^63 - 1")


def _finite(what: str, seconds: float, *, least: float = 0.001) -> float:
    if not (math.isfinite(seconds) and least <= seconds <= LONGEST_WAIT):
        raise InputError(f"{what} is {seconds} s; give a number from {least:g} to {LONGEST_WAIT:g}")
    return seconds


def _milliseconds(seconds: float) -> int:
    return math.ceil(_finite("lease", seconds) * 1000)
