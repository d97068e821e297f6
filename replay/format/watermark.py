"""How far a live store has come: a few bytes, written over after every commit and never waited for.

Readers in other processes learn from it what they may read. After a crash it tells rot from a torn
end: whatever lies before what it calls durable was on the disk once, so bytes that are wrong there
have changed since. A lost or old mark says less and never anything false.
"""

import struct
import zlib
from dataclasses import dataclass

NAME = "MARK"
MAGIC = b"m3pm"
LAYOUT = struct.Struct("<4sIQ8sQQQQ")
CHECKED = 8  # bytes before those that the checksum covers


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    log: int  # number of the open log
    salt: bytes  # of that log: one written anew is another log
    visible: int  # bytes of it that may be read
    durable: int  # bytes of it that were synced
    manifest: int  # bytes of the manifest that were synced
    closed: bool  # the writer ended in order: there is nothing beyond these bytes

    def encode(self) -> bytes:
        content = LAYOUT.pack(
            MAGIC, 0, self.log, self.salt, self.visible, self.durable, self.manifest, self.closed
        )
        crc = zlib.crc32(content[CHECKED:])
        return MAGIC + crc.to_bytes(4, "little") + content[CHECKED:]


def decode(content: bytes) -> Watermark | None:
    """None for anything else than a whole mark."""
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
