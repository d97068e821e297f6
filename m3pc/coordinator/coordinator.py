"""The coordinator over any table: read a record, apply a rule, compare-and-swap, or try again.

No number is given out twice, even though a table may lose everything and the disk may lack the
newest numbers. Each rebuild of a table takes a new generation from the disk. Later numbers carry
the generation in their high bits, so they exceed all numbers of earlier generations. A rebuild
joins the records of the disk, the table and this client by maximum. A client that reads an older
record than it remembers raises the stored record, so versions never go back.
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
    MARKER,
    POINTERS,
    RECORD_TYPES,
    SLOTS,
    DamagedRecordError,
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
    Pointer,
    Published,
    RecoveredState,
    Version,
)

log = logging.getLogger(__name__)

LONGEST_PATH = 1024  # characters
SLOT_LIMIT = 1 << 31
REBUILDS = 5  # per call; more means that another program destroys the records
LONGEST_WAIT = 86_400.0  # seconds
POLL_INTERVAL = 0.1  # seconds between two reads in `watch`
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

A = TypeVar("A")
Rule = Callable[[R, int, int], tuple[R, A]]  # record, base, now -> record, answer
Records = dict[tuple[str, str], Record]  # by kind and name


class TableCoordinator:
    """A `Coordinator`. Threads may share an instance, processes may not."""

    def __init__(
        self,
        table: Table,
        *,
        generations: Path,
        recover: Callable[[], RecoveredState] = RecoveredState,
        deadline: float = 5.0,
    ) -> None:
        """`generations` is a folder that all users of the table share; `recover` reads the disk."""
        self._table, self._generations, self._recover = table, generations, recover
        self._seconds = _finite("deadline", deadline)
        self._remembered: Records = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._table.where})"

    def register(self, slot: int) -> int:
        return self._change(SLOTS, _slot_name(slot), rules.register)

    def heartbeat(self, slot: int, incarnation: int) -> bool:
        return self._change(
            SLOTS,
            _slot_name(slot),
            lambda record, base, now: rules.heartbeat(record, incarnation, base, now),
        )

    def new_epoch(self, name: str) -> int:
        return self._change(
            POINTERS, _checked_name(name), lambda record, base, _: rules.new_epoch(record, base)
        )

    def publish(self, name: str, pointer: Pointer) -> Published:
        _check_pointer(pointer)
        return self._change(
            POINTERS,
            _checked_name(name),
            lambda record, base, _: rules.publish(record, pointer, base),
        )

    def read(self, name: str) -> Pointer | None:
        return self._change(POINTERS, _checked_name(name), lambda record, *_: rules.read(record))

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None:
        deadline = Deadline(_finite("timeout", timeout, minimum=0))
        while True:
            pointer = self.read(name)
            if pointer and (since is None or pointer.version > since):
                return pointer
            if deadline.remaining <= 0:
                return None
            time.sleep(min(POLL_INTERVAL, deadline.remaining))

    def close(self) -> None:
        self._table.close()

    def _change(self, record_type: RecordType[R], name: str, rule: Rule[R, A]) -> A:
        """Apply a rule to the newer of the stored and the remembered record; write any change."""
        deadline = Deadline(self._seconds)
        while True:
            snapshot, generation, stored = self._read(record_type, name, deadline)
            base = generation << record_type.record.bits
            new, answer = rule(self._known(record_type, name, stored), base, snapshot.now)
            if new == stored or self._table.swap(
                record_type.kind,
                name,
                old=snapshot.text,
                new=record_type.seal(name, new),
                marker=snapshot.marker,
                deadline=deadline,
            ):
                self._remember(record_type, name, new)
                return answer
            deadline.check(
                self._table.where,
                f"other clients changed {record_type.kind} {name} each time",
                "try again, or give a longer deadline",
            )

    def _known(self, record_type: RecordType[R], name: str, record: R) -> R:
        """The record joined with what this client remembers of it."""
        with self._lock:
            remembered = self._remembered.get((record_type.kind, name))
        return record.join(remembered) if isinstance(remembered, record_type.record) else record

    def _remember(self, record_type: RecordType[R], name: str, record: R) -> None:
        with self._lock:
            self._remembered = join(self._remembered, {(record_type.kind, name): record})

    def _read(
        self, record_type: RecordType[R], name: str, deadline: Deadline
    ) -> tuple[TableSnapshot, int, R]:
        """Return a snapshot, its generation and its record; rebuild a lost or damaged table."""
        for _ in range(REBUILDS):
            try:
                snapshot = self._table.snapshot(record_type.kind, name, deadline)
                generation = MARKER.open("", snapshot.marker).generation
                return snapshot, generation, record_type.open(name, snapshot.text)
            except RecordsLostError as lost:
                marker, reason = lost.marker, "the records are gone"
            except DamagedRecordError as damage:
                marker, reason = snapshot.marker, str(damage)
            self._rebuild(marker, reason, deadline)
        raise CoordinatorUnavailableError(
            f"{self._table.where} was rebuilt {REBUILDS} times and lost again: another program "
            "writes there; give this run a place of its own"
        )

    def _rebuild(self, marker: str, reason: str, deadline: Deadline) -> None:
        """Replace the table's contents by the joined records of table, disk and this client."""

        def make(remains: TableContents, now: int) -> tuple[str, TableContents]:
            records = join(_intact_records(remains), _records_of(self._recover()))
            with self._lock:
                records = join(records, self._remembered)
            used = [record.number >> record.bits for record in records.values() if record.number]
            generation = next_generation(self._generations, max(used, default=-1) + 1)
            log.log(
                logging.WARNING if generation else logging.INFO,  # 0: a new run, no loss
                "event=coordinator-rebuilt where=%s generation=%d records=%d reason=%r",
                self._table.where,
                generation,
                len(records),
                reason,
            )
            return MARKER.seal("", RunMarker(generation=generation)), _sealed(records, now)

        self._table.rebuild(marker, make, deadline)


def join(a: Records, b: Records) -> Records:
    """The union of both; records under the same key are joined."""
    return a | {key: record.join(a[key]) if key in a else record for key, record in b.items()}


def _intact_records(contents: TableContents) -> Records:
    """The records of a damaged table that can still be read."""
    records: Records = {}
    for kind, texts in contents.items():
        for name, text in texts.items():
            try:
                records[kind, name] = RECORD_TYPES[kind].open(name, text)
            except DamagedRecordError as damage:
                log.warning("event=coordinator-record-dropped reason=%r", str(damage))
    return records


def _records_of(state: RecoveredState) -> Records:
    records: Records = {
        (SLOTS.kind, str(slot)): SlotRecord(incarnation=incarnation)
        for slot, incarnation in state.incarnations.items()
    }
    for name, pointer in state.pointers.items():
        epoch = pointer.version.epoch
        records[POINTERS.kind, name] = PointerRecord(epoch=epoch, pointer=pointer)
    return records


def _sealed(records: Records, now: int) -> TableContents:
    """Seal the records for a new table; the beats of its slots start at `now`."""
    contents: dict[str, dict[str, str]] = {kind: {} for kind in RECORD_TYPES}
    for (kind, name), record in records.items():
        started = {"beat": now} if isinstance(record, SlotRecord) else {}
        contents[kind][name] = RECORD_TYPES[kind].seal(name, record.model_copy(update=started))
    return contents


def _slot_name(slot: int) -> str:
    if not 0 <= slot < SLOT_LIMIT:
        raise InputError(f"slot is {slot}; give a number from 0 to {SLOT_LIMIT - 1}")
    return str(slot)


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InputError(
            f"name is {name[:80]!r}; give 1 to 64 letters, digits, dots, hyphens or underscores"
        )
    return name


def _check_pointer(pointer: Pointer) -> None:
    if not 0 < len(pointer.path) <= LONGEST_PATH or not pointer.path.isprintable():
        raise InputError(
            f"path is {pointer.path[:80]!r}; give 1 to {LONGEST_PATH} printable characters"
        )
    if not re.fullmatch("[0-9a-f]{64}", pointer.sha256):
        raise InputError(f"sha256 is {pointer.sha256[:80]!r}; give its 64 hexadecimal digits")
    for field, number in (("number", pointer.version.number), ("size", pointer.size)):
        if not 0 <= number < 1 << 63:
            raise InputError(f"{field} is {number}; give a number from 0 to 2^63 - 1")


def _finite(name: str, seconds: float, *, minimum: float = 0.001) -> float:
    if not (math.isfinite(seconds) and minimum <= seconds <= LONGEST_WAIT):
        raise InputError(
            f"{name} is {seconds} s; give a number from {minimum:g} to {LONGEST_WAIT:g}"
        )
    return seconds
