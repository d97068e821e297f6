"""The records of a coordinator: one per slot or pointer, stored as sealed text.

Two versions of a record join into the newer one, in either order. Times are milliseconds on the
table's clock.
"""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m3pc.coordinator.generations import GENERATION_BITS
from m3pc.types import EPOCH_BITS, Pointer

LONGEST_SEALED = 8192  # characters of a sealed record

StoredInt = Annotated[int, Field(ge=0, lt=1 << 63)]


class DamagedRecordError(Exception):
    """A stored record was changed or damaged after it was written."""


class Record(BaseModel):
    """Base of all records. SQLite files and Redis contain the field names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    bits: ClassVar[int] = 40  # low bits of each number; the bits above hold the generation

    @property
    def number(self) -> int:
        """The highest number known to have been given out."""
        raise NotImplementedError

    def join(self, other: Self) -> Self:
        """Merge two versions of this record; the newer fields win."""
        raise NotImplementedError


class SlotRecord(Record):
    incarnation: StoredInt = 0
    beat: StoredInt = 0  # time of the last registration or heartbeat; for inspection only

    @property
    def number(self) -> int:
        return self.incarnation

    def join(self, other: Self) -> Self:
        return max(self, other, key=lambda slot: (slot.incarnation, slot.beat))


class PointerRecord(Record):
    """A pointer and the newest epoch. Only the newest epoch may move the pointer."""

    bits: ClassVar[int] = EPOCH_BITS - GENERATION_BITS  # a packed version contains the epoch
    epoch: StoredInt = 0
    pointer: Pointer | None = None

    @property
    def number(self) -> int:
        return self.epoch

    def join(self, other: Self) -> Self:
        pointers = [record.pointer for record in (self, other) if record.pointer]
        return type(self)(
            epoch=max(self.epoch, other.epoch),
            pointer=max(pointers, key=lambda pointer: pointer.version, default=None),
        )


class RunMarker(Record):
    """Shows that a table holds this run, and how often its records were lost."""

    generation: StoredInt = 0


R = TypeVar("R", bound=Record)


class RecordType(Generic[R]):
    """Seals and opens the records of one kind: checksum, nonce, JSON."""

    def __init__(self, kind: str, record: type[R]) -> None:
        self.kind, self.record = kind, record

    def seal(self, name: str, record: R) -> str:
        """Return a text that no other call returns, so a client can recognise its own write."""
        content = f"{secrets.token_hex(8)} {record.model_dump_json()}"
        return f"{self._digest(name, content)} {content}"

    def open(self, name: str, text: str | None) -> R:
        """Return the record; an empty record if `text` is None."""
        if text is None:
            return self.record()
        digest, _, content = text.partition(" ")
        if len(text) > LONGEST_SEALED or digest != self._digest(name, content):
            raise DamagedRecordError(f"{self.kind} {name!r}: the checksum is wrong")
        try:
            return self.record.model_validate_json(content.partition(" ")[2])
        except ValidationError:
            raise DamagedRecordError(f"{self.kind} {name!r}: not a record of this format") from None

    def _digest(self, name: str, content: str) -> str:
        sealed = f"{self.kind} {name} {content}".encode(errors="surrogatepass")
        return hashlib.sha256(sealed).hexdigest()[:32]


SLOTS = RecordType("slots", SlotRecord)
POINTERS = RecordType("pointers", PointerRecord)
MARKER = RecordType("marker", RunMarker)
# Record types by kind. Tables of earlier versions also hold "leases", which are ignored.
RECORD_TYPES: Mapping[str, RecordType[Any]] = {SLOTS.kind: SLOTS, POINTERS.kind: POINTERS}
