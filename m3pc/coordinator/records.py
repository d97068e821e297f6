"""What a coordinator remembers: one small record a slot, lease or pointer, each as sealed text.

Two memories of one record join into the later one, in whatever order they meet. Times are
milliseconds on the back-end's clock.
"""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m3pc.coordinator.generations import GENERATION_BITS
from m3pc.types import EPOCH_BITS, Pointer

LARGEST = 8192  # characters of a sealed record

StoredInt = Annotated[int, Field(ge=0, lt=1 << 63)]


class DamagedRecordError(Exception):
    """A record is not as it was written."""


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    bits: ClassVar[int] = 40  # of its numbers in one generation, which stands above them

    @property
    def number(self) -> int:
        """The highest that is known to be given out."""
        raise NotImplementedError

    def join(self, other: Self) -> Self:
        raise NotImplementedError


class SlotRecord(Record):
    incarnation: StoredInt = 0
    beat: StoredInt = 0  # when it was last heard of

    @property
    def number(self) -> int:
        return self.incarnation

    def join(self, other: Self) -> Self:
        return max(self, other, key=lambda slot: (slot.incarnation, slot.beat))


class Hold(Record):
    """A lease as the back-end sees it. Free when its time is over."""

    fencing: StoredInt = 0
    holder: str = ""  # nobody knows after a loss
    since: StoredInt = 0
    length: StoredInt = 0  # milliseconds; 0 once released

    @property
    def number(self) -> int:
        return self.fencing

    def join(self, other: Self) -> Self:
        return max(self, other, key=lambda hold: (hold.fencing, hold.since, -hold.length))

    def is_held(self, now: int) -> bool:
        return now < self.since + self.length


class PointerRecord(Record):
    """A pointer, and the newest epoch that may move it."""

    bits: ClassVar[int] = EPOCH_BITS - GENERATION_BITS  # an epoch is a part of a packed version
    epoch: StoredInt = 0
    pointer: Pointer | None = None

    @property
    def number(self) -> int:
        return self.epoch

    def join(self, other: Self) -> Self:
        pointers = [track.pointer for track in (self, other) if track.pointer]
        return type(self)(
            epoch=max(self.epoch, other.epoch),
            pointer=max(pointers, key=lambda pointer: pointer.version, default=None),
        )


class RunMarker(Record):
    """Says that a back-end holds this run, and since which loss."""

    generation: StoredInt = 0


R = TypeVar("R", bound=Record)


class RecordType(Generic[R]):
    """Records of one type under a name."""

    def __init__(self, name: str, record: type[R]) -> None:
        self.name, self.record = name, record

    def seal(self, name: str, record: R) -> str:
        """As text that no other call will write: who finds it knows who wrote it."""
        rest = f"{secrets.token_hex(8)} {record.model_dump_json()}"
        return f"{self._digest(name, rest)} {rest}"

    def open(self, name: str, text: str | None) -> R:
        """The record, or an empty one where there is none."""
        if text is None:
            return self.record()
        digest, _, rest = text.partition(" ")
        if len(text) > LARGEST or digest != self._digest(name, rest):
            raise DamagedRecordError(f"{self.name} {name!r}: the checksum is wrong")
        try:
            return self.record.model_validate_json(rest.partition(" ")[2])
        except ValidationError:
            raise DamagedRecordError(f"{self.name} {name!r}: not a record of this format") from None

    def _digest(self, name: str, rest: str) -> str:
        whole = f"{self.name} {name} {rest}".encode(errors="surrogatepass")
        return hashlib.sha256(whole).hexdigest()[:32]


SLOTS = RecordType("slots", SlotRecord)
LEASES = RecordType("leases", Hold)
POINTERS = RecordType("pointers", PointerRecord)
MARKER = RecordType("marker", RunMarker)
KINDS: Mapping[str, RecordType[Any]] = {kind.name: kind for kind in (SLOTS, LEASES, POINTERS)}
