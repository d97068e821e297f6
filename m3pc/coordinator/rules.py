"""Each coordinator call as a pure function of a record: it returns the new record and an answer.

Numbers of the current generation, given out since the records were last lost, are above `base`. A
number at or below `base` may be missing from the rebuilt record and still be the newest, so it is
accepted unless the record holds a newer one.
"""

from m3pc.coordinator.records import PointerRecord, Record, SlotRecord
from m3pc.types import InputError, Pointer, Published


def register(slot: SlotRecord, base: int, now: int) -> tuple[SlotRecord, int]:
    incarnation = _next_number(slot, base)
    return SlotRecord(incarnation=incarnation, beat=now), incarnation


def heartbeat(slot: SlotRecord, incarnation: int, base: int, now: int) -> tuple[SlotRecord, bool]:
    if incarnation < slot.incarnation:
        return slot, False
    _refuse_unknown("incarnation", incarnation, max(slot.incarnation, base), "register")
    return SlotRecord(incarnation=incarnation, beat=max(now, slot.beat)), True


def new_epoch(record: PointerRecord, base: int) -> tuple[PointerRecord, int]:
    epoch = _next_number(record, base)
    return PointerRecord(epoch=epoch, pointer=record.pointer), epoch


def read(record: PointerRecord) -> tuple[PointerRecord, Pointer | None]:
    return record, record.pointer


def publish(record: PointerRecord, pointer: Pointer, base: int) -> tuple[PointerRecord, Published]:
    epoch = pointer.version.epoch
    if epoch < record.epoch:
        return record, Published.FENCED
    _refuse_unknown("epoch", epoch, max(record.epoch, base), "new_epoch")
    if record.pointer == pointer:  # the reply to the first call was lost
        return record, Published.OK
    if record.pointer and pointer.version <= record.pointer.version:
        return record, Published.STALE
    return PointerRecord(epoch=epoch, pointer=pointer), Published.OK


def _next_number(record: Record, base: int) -> int:
    number = max(record.number, base) + 1
    if number % (1 << record.bits) == 0:  # this number belongs to the next generation
        raise InputError(
            f"the {1 << record.bits} numbers of a generation are all given out; stop the run, "
            "remove the coordinator's records and resume: that begins the next generation"
        )
    return number


def _refuse_unknown(name: str, number: int, highest: int, source: str) -> None:
    if not 1 <= number <= highest:
        raise InputError(
            f"{name} {number} was never given out, the highest was {highest}; use the one from "
            f"`{source}`"
        )
