"""The open log of a live store: frames that are whole or are not there. L steps, S state, A action.

    head   magic crc | number salt fingerprint
    frame  magic crc | slot ended reason incarnation sequence seed version steps
           last version, condition, utility (not in format 1) | the numbers

The numbers are states [L + 1, S], actions [L, A] and rewards [L] as float32, padded to 8 bytes. A
frame without steps stands for an episode that was refused. Every CRC-32 begins with the log's
random salt, so that an old log's blocks, which a file system may hand out again, are no frames.
"""

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from m3pc.types import AppendKey, Episode, Floats, InputError
from replay.format.fs import FS, File
from replay.format.manifest import Header
from replay.format.payload import TERMINATED, TRUNCATED, PayloadFault
from replay.format.schema import FORMAT
from replay.format.validation import check, possible

FOLDER = "log"
MAGIC, FRAME_MAGIC = b"m3pl", b"m3pf"
HEAD = struct.Struct("<4sIQ8s8s")
FRAMES = {  # by the store's format, which the fingerprint in the head depends on
    1: struct.Struct("<4sIIHHQQqqII"),
    2: struct.Struct("<4sIIHHQQqqIIqdd"),
}
CHECKED = 8  # bytes before those that a checksum covers
SKIPPED = 4  # bit of `ended`, beside TERMINATED and TRUNCATED
REASONS: tuple[PayloadFault, ...] = get_args(PayloadFault)
NO_TAGS = (-1, math.nan, math.nan)  # last version, condition, utility
SALT, SALT_AT = 8, 16  # bytes; where they stand in the head

Salts = Callable[[int], bytes]  # `os.urandom`, or its stand-in


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One sequence number of a producer."""

    key: AppendKey
    episode: Episode | None  # None: it was refused
    reason: PayloadFault | None = None  # why


def file_name(number: int) -> str:
    return f"{number:06d}.log"


class Log:
    """A log that grows. What was written counts after `sync`, and not at all if that fails."""

    def __init__(self, file: File, number: int, salt: bytes, end: int) -> None:
        self._file, self.number, self.salt, self.end = file, number, salt, end
        self.doubtful = False  # nobody knows what the disk has of it

    def write(self, entries: Sequence[LogEntry]) -> None:
        """All entries, or an OSError and none of them."""
        parts = [part for entry in entries for part in encode(entry, self.salt)]
        try:
            self._file.write(parts)
        except OSError:
            self.cut()
            raise
        self.end += sum(map(len, parts))

    def cut(self) -> None:
        """Remove what a failed write left. Synced, or it could be back after a power loss."""
        self.doubtful = True
        self._file.truncate(self.end)
        self._file.sync()
        self.doubtful = False

    def sync(self) -> None:
        self.doubtful = True  # once this fails, asking again would tell nothing
        self._file.sync()
        self.doubtful = False

    def close(self) -> None:
        self._file.close()


def create(fs: FS, path: Path, number: int, header: Header, salts: Salts) -> Log:
    """A new log under a name that may still be in the way; on the disk, but its name is not yet."""
    if path.name in fs.names(path.parent):
        fs.unlink(path)
    salt = salts(SALT)
    content = HEAD.pack(MAGIC, 0, number, salt, fingerprint(header))
    content = MAGIC + _checksum([content[CHECKED:]], salt) + content[CHECKED:]
    file = fs.create(path)
    try:
        file.write([content])
        file.sync()
    except OSError:
        file.close()
        raise
    return Log(file, number, salt, len(content))


def fingerprint(header: Header) -> bytes:
    """Of what the frames' sizes depend on, and of the store's source."""
    text = header.model_dump_json().encode()
    return struct.pack("<II", zlib.crc32(text), zlib.crc32(text, 1))


def read_salt(content: bytes, number: int, header: Header) -> bytes | None:
    """The salt of a log with this number of this store; None if these bytes are something else."""
    if len(content) < HEAD.size:
        return None
    magic, crc, found, salt, mine = HEAD.unpack_from(content)
    whole = crc.to_bytes(4, "little") == _checksum([content[CHECKED : HEAD.size]], salt)
    right = magic == MAGIC and found == number and mine == fingerprint(header)
    return salt if whole and right else None


def encode(entry: LogEntry, salt: bytes) -> list[bytes]:
    key, episode = entry.key, entry.episode
    if episode is None:
        assert entry.reason is not None, "a refused episode has a reason"
        ended, steps, seed, version = SKIPPED, 0, 0, 0
        reason, numbers, tags = REASONS.index(entry.reason), b"", NO_TAGS
    else:
        ended = TERMINATED * episode.terminated | TRUNCATED * episode.truncated
        steps, seed, version, reason = len(episode), episode.seed, episode.version, 0
        tags = (episode.last_version, episode.target_return, episode.utility)
        columns = (episode.states, episode.actions, episode.rewards)
        numbers = b"".join(column.tobytes() for column in columns)
        numbers += bytes(-len(numbers) % 8)
    fields = (ended, reason, key.incarnation, key.sequence, seed, version, steps, 0, *tags)
    head = FRAMES[FORMAT].pack(FRAME_MAGIC, 0, key.slot, *fields)
    return [FRAME_MAGIC + _checksum([head[CHECKED:], numbers], salt) + head[CHECKED:], numbers]


def frames(
    content: bytes | memoryview, place: int, header: Header, salt: bytes
) -> Iterator[tuple[LogEntry, int]]:
    """The entries from `place` on, each with where it ends, up to the first that is not whole."""
    while (found := frame(content, place, header, salt)) is not None:
        yield found
        place = found[1]


class EntryHeader(NamedTuple):
    magic: bytes
    crc: int
    slot: int
    ended: int
    reason: int
    incarnation: int
    sequence: int
    seed: int
    version: int
    steps: int
    zero: int
    last_version: int = NO_TAGS[0]
    condition: float = NO_TAGS[1]
    utility: float = NO_TAGS[2]


def frame(
    content: bytes | memoryview, place: int, header: Header, salt: bytes
) -> tuple[LogEntry, int] | None:
    """What stands at `place` and where it ends; None if that is no whole frame."""
    layout = FRAMES[header.format]
    start = place + layout.size
    if len(content) < start or content[place : place + 4] != FRAME_MAGIC:
        return None
    head, view = EntryHeader(*layout.unpack_from(content, place)), memoryview(content)
    end = start + (0 if head.ended == SKIPPED else _size(header, head.steps))
    if head.steps > header.max_episode_steps or end > len(content):
        return None
    checksum = _checksum([view[place + CHECKED : start], view[start:end]], salt)
    if head.crc.to_bytes(4, "little") != checksum:
        return None
    entry = _entry(head, view[start:end], header)
    return None if entry is None else (entry, end)


def _entry(head: EntryHeader, numbers: memoryview, header: Header) -> LogEntry | None:
    """None where the checksum fits, but what it covers is nothing that we write."""
    key = AppendKey(head.slot, head.incarnation, head.sequence)
    if not possible(key) or head.reason >= len(REASONS):
        return None
    if head.ended == SKIPPED:
        return LogEntry(key, None, REASONS[head.reason])
    if head.ended & ~(TERMINATED | TRUNCATED):
        return None
    states, actions, rewards = _columns(numbers, header, head.steps)
    episode = Episode(
        states=states,
        actions=actions,
        rewards=rewards,
        terminated=bool(head.ended & TERMINATED),
        truncated=bool(head.ended & TRUNCATED),
        seed=head.seed,
        version=head.version,
        last_version=head.last_version,
        target_return=head.condition,
        utility=head.utility,
    )
    try:
        check(episode, header, number=0)
    except InputError:
        return None
    return LogEntry(key, episode)


def _size(header: Header, steps: int) -> int:
    width = header.states + header.actions + 1
    return -(-4 * (steps * width + header.states) // 8) * 8


def _columns(numbers: memoryview, header: Header, steps: int) -> tuple[Floats, Floats, Floats]:
    """States, actions, rewards."""
    sizes = (steps + 1) * header.states, steps * header.actions, steps
    values = np.frombuffer(numbers, np.float32, sum(sizes))
    states, actions, rewards = np.split(values, np.cumsum(sizes)[:-1])
    return states.reshape(-1, header.states), actions.reshape(-1, header.actions), rewards


def _checksum(parts: Sequence[bytes | memoryview], salt: bytes) -> bytes:
    crc = zlib.crc32(salt)
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc.to_bytes(4, "little")
