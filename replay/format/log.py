"""The open log of a live store, made of checked frames. L steps, S state, A action.

    head   magic crc | number salt fingerprint
    frame  magic crc | slot ended reason incarnation sequence seed version steps
           last version, target return, utility (not in format 1) | the numbers

The numbers are states [L + 1, S], actions [L, A] and rewards [L] as float32, padded to a
multiple of 8 bytes. A frame without steps records a refused episode. Every CRC-32 begins with
the log's random salt, so blocks of an old log that the file system reuses are no valid frames.
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
from replay.format.validation import check_episode, is_valid_key

FOLDER = "log"
MAGIC, FRAME_MAGIC = b"m3pl", b"m3pf"
HEAD = struct.Struct("<4sIQ8s8s")
FRAMES = {  # one layout per store format, on which the head's fingerprint depends
    1: struct.Struct("<4sIIHHQQqqII"),
    2: struct.Struct("<4sIIHHQQqqIIqdd"),
}
CHECKED = 8  # offset of the first byte that a checksum covers
SKIPPED = 4  # value of `ended` for a refused episode
REASONS: tuple[PayloadFault, ...] = get_args(PayloadFault)
NO_TAGS = (-1, math.nan, math.nan)  # last version, target return, utility
SALT, SALT_AT = 8, 16  # size in bytes; offset in the head

Salts = Callable[[int], bytes]  # `os.urandom`, or a reproducible one in tests


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An episode that was stored, or the record of one that was refused."""

    key: AppendKey
    episode: Episode | None  # None: refused
    reason: PayloadFault | None = None  # why the episode was refused


def file_name(number: int) -> str:
    return f"{number:06d}.log"


class Log:
    """A growing log. Entries survive a power loss once they are synced."""

    def __init__(self, file: File, number: int, salt: bytes, end: int) -> None:
        self._file, self.number, self.salt, self.end = file, number, salt, end
        self.doubtful = False  # whether the content on the disk is unknown

    def write(self, entries: Sequence[LogEntry]) -> None:
        """Write all entries. After an OSError none is in the log, unless the log is `doubtful`."""
        parts = [part for entry in entries for part in encode(entry, self.salt)]
        try:
            self._file.write(parts)
        except OSError:
            self.cut()
            raise
        self.end += sum(map(len, parts))

    def cut(self) -> None:
        """Cut off a failed write and sync: otherwise it could reappear after a power loss."""
        self.doubtful = True
        self._file.truncate(self.end)
        self._file.sync()
        self.doubtful = False

    def sync(self) -> None:
        self.doubtful = True  # if this fails, a second sync would prove nothing
        self._file.sync()
        self.doubtful = False

    def close(self) -> None:
        self._file.close()


def create(fs: FS, path: Path, number: int, header: Header, salts: Salts) -> Log:
    """Create a log and sync it, but not its name. Replaces an existing file."""
    if path.name in fs.names(path.parent):
        fs.unlink(path)
    salt = salts(SALT)
    content = HEAD.pack(MAGIC, 0, number, salt, fingerprint(header))
    content = MAGIC + checksum([content[CHECKED:]], salt) + content[CHECKED:]
    file = fs.create(path)
    try:
        file.write([content])
        file.sync()
    except OSError:
        file.close()
        raise
    return Log(file, number, salt, len(content))


def fingerprint(header: Header) -> bytes:
    """Checksum of the header, which determines the sizes of frames and names the store's source."""
    text = header.model_dump_json().encode()
    return struct.pack("<II", zlib.crc32(text), zlib.crc32(text, 1))


def read_salt(content: bytes, number: int, header: Header) -> bytes | None:
    """Return the salt of log `number` of this store; None if the head is not that log's."""
    if len(content) < HEAD.size:
        return None
    magic, crc, log_number, salt, print_ = HEAD.unpack_from(content)
    complete = crc.to_bytes(4, "little") == checksum([content[CHECKED : HEAD.size]], salt)
    expected = (MAGIC, number, fingerprint(header))
    return salt if complete and (magic, log_number, print_) == expected else None


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
    return [FRAME_MAGIC + checksum([head[CHECKED:], numbers], salt) + head[CHECKED:], numbers]


def frames(
    content: bytes | memoryview, place: int, header: Header, salt: bytes
) -> Iterator[tuple[LogEntry, int]]:
    """Yield entries from `place` on with the offsets of their ends, up to an incomplete frame."""
    while (entry_end := frame(content, place, header, salt)) is not None:
        yield entry_end
        place = entry_end[1]


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
    target_return: float = NO_TAGS[1]
    utility: float = NO_TAGS[2]


def frame(
    content: bytes | memoryview, place: int, header: Header, salt: bytes
) -> tuple[LogEntry, int] | None:
    """Return the entry at `place` and the offset of its end; None if there is no complete frame."""
    layout = FRAMES[header.format]
    start = place + layout.size
    if len(content) < start or content[place : place + 4] != FRAME_MAGIC:
        return None
    head, view = EntryHeader(*layout.unpack_from(content, place)), memoryview(content)
    end = start + (0 if head.ended == SKIPPED else numbers_size(header, head.steps))
    if head.steps > header.max_episode_steps or end > len(content):
        return None
    digits = checksum([view[place + CHECKED : start], view[start:end]], salt)
    if head.crc.to_bytes(4, "little") != digits:
        return None
    entry = _entry(head, view[start:end], header)
    return None if entry is None else (entry, end)


def _entry(head: EntryHeader, numbers: memoryview, header: Header) -> LogEntry | None:
    """Decode a frame with a correct checksum; None if no writer makes such content."""
    key = AppendKey(head.slot, head.incarnation, head.sequence)
    if not is_valid_key(key) or head.reason >= len(REASONS):
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
        target_return=head.target_return,
        utility=head.utility,
    )
    try:
        check_episode(episode, header, number=0)
    except InputError:
        return None
    return LogEntry(key, episode)


def numbers_size(header: Header, steps: int) -> int:
    width = header.states + header.actions + 1
    return -(-4 * (steps * width + header.states) // 8) * 8


def _columns(numbers: memoryview, header: Header, steps: int) -> tuple[Floats, Floats, Floats]:
    """Return states, actions, rewards."""
    sizes = (steps + 1) * header.states, steps * header.actions, steps
    values = np.frombuffer(numbers, np.float32, sum(sizes))
    states, actions, rewards = np.split(values, np.cumsum(sizes)[:-1])
    return states.reshape(-1, header.states), actions.reshape(-1, header.actions), rewards


def checksum(parts: Sequence[bytes | memoryview], salt: bytes) -> bytes:
    crc = zlib.crc32(salt)
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc.to_bytes(4, "little")
