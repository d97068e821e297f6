"""What an Arrow IPC file says of its first batch, before Arrow reads it: whether it is packed.

Arrow unpacks a compressed column to whatever size stands in front of it, thousands of times that of
the file. Columns of a store are plain, so that they can be mapped; one that is not is never read.

The footer at the end of a file says where its batches are; footer and batches are described in
flatbuffers: tables, whose fields are found by number (https://arrow.apache.org/docs/format).
"""

import mmap
import struct

MAGIC = b"ARROW1"
CONTINUES = 0xFFFFFFFF  # in front of a message, but for files of old versions
BATCHES = 3  # fields of a footer,
HEADER, NOTES = 2, 4  # of a message,
COMPRESSION = 3  # and of the batch that is its header


def is_packed(content: bytes | mmap.mmap) -> bool:
    """Whether the first batch is compressed, also as old versions did: by a note at its message.

    struct.error where this is no Arrow file.
    """
    end = len(content) - len(MAGIC) - 4
    footer = _follow(content, end - _number("<i", content, end))
    blocks = _follow(content, _field(content, footer, BATCHES))
    place = _number("<q", content, blocks + 4)  # behind their count
    place += 8 if _number("<I", content, place) == CONTINUES else 4
    message = _follow(content, place)
    batch = _follow(content, _field(content, message, HEADER))
    return bool(_field(content, batch, COMPRESSION) or _field(content, message, NOTES))


def _field(content: bytes | mmap.mmap, table: int, number: int) -> int:
    """Where a field of a table is; 0 where the table has none of this number."""
    places = table - _number("<i", content, table)
    entry = 4 + 2 * number
    if entry >= _number("<H", content, places):
        return 0
    offset = _number("<H", content, places + entry)
    return table + offset if offset else 0


def _follow(content: bytes | mmap.mmap, place: int) -> int:
    return place + _number("<I", content, place)


def _number(form: str, content: bytes | mmap.mmap, place: int) -> int:
    if place < 0:  # which Python would count from the end
        raise struct.error(f"there is nothing at {place}")
    found: int = struct.unpack_from(form, content, place)[0]
    return found
