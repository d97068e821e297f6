"""The watermark of a live store: a few bytes, overwritten after every commit and not synced.

The watermark tells readers in other processes how far they may read. After a crash it distinguishes
damage from a torn end: everything before `durable` was on the disk, so wrong bytes there have
changed since. A lost or old watermark says less, but never anything false.
"""

import struct
import zlib
from dataclasses import dataclass

NAME = "MARK"
MAGIC = b"m3pm"
LAYOUT = struct.Struct("<4sIQ8sQQQQ")
CHECKED = 8  # offset of the first byte that the checksum covers


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    log: int  # number of the open log
    salt: bytes  # salt of the open log; a rewritten log has another one
    visible: int  # bytes of the log that may be read
    durable: int  # bytes of the log that were synced
    manifest: int  # bytes of the manifest that were synced
    closed: bool  # whether the writer closed the store: nothing was written afterwards

    def encode(self) -> bytes:
        content = LAYOUT.pack(
            MAGIC, 0, self.log, self.salt, self.visible, self.durable, self.manifest, self.closed
        )
        crc = zlib.crc32(content[CHECKED:])
        return MAGIC + crc.to_bytes(4, "little") + content[CHECKED:]


def decode(content: bytes) -> Watermark | None:
    """Return None for anything but a complete watermark."""
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
