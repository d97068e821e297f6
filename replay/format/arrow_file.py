"""Detects compressed Arrow IPC files before Arrow reads them.

Arrow decompresses a column to whatever size the file claims, possibly thousands of times the file's
own. A store's columns are never compressed, so that they can be mapped: others are refused unread.

The footer of a file says where the batches are. Footer and batches are described in flatbuffers:
tables whose fields are looked up by number (https://arrow.apache.org/docs/format).
"""

import mmap
import struct

MAGIC = b"ARROW1"
CONTINUATION = 0xFFFFFFFF  # precedes a message, except in files of old versions
BATCHES = 3  # field of a footer
HEADER, METADATA = 2, 4  # fields of a message
COMPRESSION = 3  # field of a record batch, the header of its message


def is_compressed(content: bytes | mmap.mmap) -> bool:
    """Whether the first batch is compressed or its message has metadata, in which old versions of
    Arrow declared compression. struct.error: this is no Arrow file."""
    end = len(content) - len(MAGIC) - 4
    footer = _follow(content, end - _number("<i", content, end))
    blocks = _follow(content, _field(content, footer, BATCHES))
    place = _number("<q", content, blocks + 4)  # after the number of blocks
    place += 8 if _number("<I", content, place) == CONTINUATION else 4
    message = _follow(content, place)
    batch = _follow(content, _field(content, message, HEADER))
    return bool(_field(content, batch, COMPRESSION) or _field(content, message, METADATA))


def _field(content: bytes | mmap.mmap, table: int, number: int) -> int:
    """Return the offset of a field; 0 if the table lacks the field."""
    offsets = table - _number("<i", content, table)
    entry = 4 + 2 * number
    if entry >= _number("<H", content, offsets):
        return 0
    offset = _number("<H", content, offsets + entry)
    return table + offset if offset else 0


def _follow(content: bytes | mmap.mmap, place: int) -> int:
    return place + _number("<I", content, place)


def _number(form: str, content: bytes | mmap.mmap, place: int) -> int:
    if place < 0:  # a negative offset counts from the end
        raise struct.error(f"there is nothing at {place}")
    number: int = struct.unpack_from(form, content, place)[0]
    return number
