"""The watermark of a live store: a few bytes, overwritten after every commit and not synced.

Readers in other processes learn from it how far they may read. After a crash it tells damage from a
torn end: everything before its `durable` position was on the disk, so wrong bytes there have
changed since. A lost or old watermark says less, but never anything false.
"""

import struct
import zlib
from dataclasses import dataclass

NAME = "MARK"
MAGIC = b"m3pm"
LAYOUT = struct.Struct("<4sIQ8sQQQQ")
CHECKED = 8  # offset from which the checksum covers the bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    log: int  # number of the open log
    salt: bytes  # of that log; a rewritten log has another
    visible: int  # bytes of the log that may be read
    durable: int  # bytes of the log that were synced
    manifest: int  # bytes of the manifest that were synced
    closed: bool  # the writer ended in order: nothing follows these bytes

    def encode(self) -> bytes:
        content = LAYOUT.pack(
            MAGIC, 0, self.log, self.salt, self.visible, self.durable, self.manifest, self.closed
        )
        crc = zlib.crc32(content[CHECKED:])
        return MAGIC + crc.to_bytes(4, "little") + content[CHECKED:]


def decode(content: bytes) -> Watermark | None:
    """None for anything but a complete watermark."""
    if len(content) != LAYOUT.size:
        return None
    magic, crc, log, salt, visible, durable, manifest, closed = LAYOUT.unpack(content)
    if magic != MAGIC or crc != zlib.crc32(content[CHECKED:]):
        return None
    return Watermark(
        log=log,
        salt=salt,
        visible=visible,
        durable=durable,
        manifest=manifest,
        closed=bool(closed),
    )
