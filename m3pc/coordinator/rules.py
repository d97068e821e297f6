"""What each call does to its record, as pure functions: the new record, and an answer.

`base` is the least number that nobody can have been given before the last loss. A number at or
below it may be older than the record's and yet the newest that anybody remembers: whoever shows
it is believed, unless a newer one is known. New numbers are above `base`.
"""

from m3pc.coordinator.records import Hold, PointerRecord, Record, SlotRecord
from m3pc.types import InputError, Lease, Pointer, Published


def register(slot: SlotRecord, base: int, now: int) -> tuple[SlotRecord, int]:
    incarnation = _next(slot, base)
    return SlotRecord(incarnation=incarnation, beat=now), incarnation


def heartbeat(slot: SlotRecord, incarnation: int, base: int, now: int) -> tuple[SlotRecord, bool]:
    if incarnation < slot.incarnation:
        return slot, False
    _refuse_invented("incarnation", incarnation, max(slot.incarnation, base), "register")
    return SlotRecord(incarnation=incarnation, beat=max(now, slot.beat)), True


def grant(hold: Hold, holder: str, length: int, base: int, now: int) -> tuple[Hold, int | None]:
    if hold.is_held(now) and hold.holder != holder:
        return hold, None
    fencing = _next(hold, base)
    return Hold(fencing=fencing, holder=holder, since=now, length=length), fencing


def renew(hold: Hold, lease: Lease, length: int, base: int, now: int) -> tuple[Hold, bool]:
    _refuse_invented("fencing number", lease.fencing, max(hold.fencing, base), "lease")
    if hold.fencing == lease.fencing and hold.holder:
        renewed = hold.holder == lease.holder and hold.is_held(now)
    else:
        renewed = hold.fencing <= lease.fencing  # forgotten in a loss, and granted to nobody since
    if not renewed:
        return hold, False
    since = max(now, hold.since)
    return Hold(fencing=lease.fencing, holder=lease.holder, since=since, length=length), True


def release(hold: Hold, lease: Lease, base: int, now: int) -> Hold:
    _refuse_invented("fencing number", lease.fencing, max(hold.fencing, base), "lease")
    if hold.fencing > lease.fencing or (hold.fencing == lease.fencing and not hold.is_held(now)):
        return hold
    return Hold(fencing=lease.fencing, holder=lease.holder, since=max(now, hold.since), length=0)


def new_epoch(track: PointerRecord, base: int) -> tuple[PointerRecord, int]:
    epoch = _next(track, base)
    return PointerRecord(epoch=epoch, pointer=track.pointer), epoch


def publish(track: PointerRecord, pointer: Pointer, base: int) -> tuple[PointerRecord, Published]:
    epoch = pointer.version.epoch
    if epoch < track.epoch:
        return track, Published.FENCED
    _refuse_invented("epoch", epoch, max(track.epoch, base), "new_epoch")
    if track.pointer == pointer:  # the reply to the first call was lost
        return track, Published.OK
    if track.pointer and pointer.version <= track.pointer.version:
        return track, Published.STALE
    return PointerRecord(epoch=epoch, pointer=pointer), Published.OK


def _next(record: Record, base: int) -> int:
    number = max(record.number, base) + 1
    if number % (1 << record.bits) == 0:  # where the next generation's numbers begin
        raise InputError(
            f"the {1 << record.bits} numbers of a generation are all given out; stop the run, "
            "remove the coordinator's records and resume: that begins the next generation"
        )
    return number


def _refuse_invented(what: str, number: int, highest: int, source: str) -> None:
    if not 1 <= number <= highest:
        raise InputError(
            f"{what} {number} was never given out, the highest was {highest}; use the one from "
            f"`{source}`"
        )
