"""The manifest lists what a store holds: an append-only text file, one JSON event per line.

    9a0c1f2e {"event": "open", ...}       sizes, source, format; "live" for a growing store
    51d0b7aa {"event": "seal", ...}       one segment: rows, bytes and SHA-256 of its two files
    e2f6c411 {"event": "close", ...}      totals: the store is finished

In a live store `roll` means that a log became a segment, `drop` that segments were removed,
`quarantine` that a damaged one was set aside, `withdraw` that a producer is no longer trusted.

The eight digits are the CRC-32 of all JSON before the line and of the line's own, so a changed,
lost, added or swapped line is detected.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from m3pc.types import InputError
from replay.format.fs import FS
from replay.format.schema import FORMAT, READABLE

NAME = "MANIFEST"
MAX_BYTES = 64 << 20  # about 200,000 segments


class DamagedError(InputError):
    """Bytes that were on the disk have changed or are missing."""

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        cure = "restore it from a copy"
        if path.name != NAME:  # without the manifest nothing can be recovered
            cure += ", or go on without what is lost by `m3pc replay drop STORE --damaged`, which "
            cure += "sets damaged files aside"
        super().__init__(f"{path} is damaged: {what}; {cure}")


Number = Annotated[int, Field(ge=0, lt=2**63)]


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Header(Event):
    """Properties that all episodes of a store share."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    event: Literal["open", "live"] = "open"
    format: int = FORMAT
    states: int = Field(ge=1, le=65_536)  # S
    actions: int = Field(ge=1, le=65_536)  # A
    # H, the environment's step limit; files call it `horizon`
    max_episode_steps: int = Field(ge=1, validation_alias="horizon", serialization_alias="horizon")
    env: str | None  # id of the environment, if known
    source: dict[str, Any]  # where the episodes came from: kind, name, hash, options


class FileEntry(Event):
    name: str = Field(pattern=r"^[0-9]{6}\.(steps|episodes)\.arrow$")
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Seal(Event):
    event: Literal["seal"] = "seal"
    steps: FileEntry
    episodes: FileEntry


class Close(Event):
    event: Literal["close"] = "close"
    segments: int
    steps: int
    episodes: int


class Roll(Event):
    """Log `number` became segment `number`; it has no files if all its episodes were refused."""

    event: Literal["roll"] = "roll"
    number: int = Field(ge=0)
    steps: FileEntry | None
    episodes: FileEntry | None
    refused: int = Field(ge=0)  # episodes
    terminated: int = Field(default=0, ge=0)  # episodes; not counted in format 1
    truncated: int = Field(default=0, ge=0)
    producers: list[tuple[Number, Number, Number]]  # slot, incarnation, next sequence


class Drop(Event):
    event: Literal["drop"] = "drop"
    numbers: list[int]
    reason: Literal["retention", "operator"]


class Quarantine(Event):
    event: Literal["quarantine"] = "quarantine"
    number: int
    reason: str


class Withdraw(Event):
    """Episodes of this producer are never sampled again."""

    event: Literal["withdraw"] = "withdraw"
    slot: Number
    incarnation: Number | None  # None: all, also later ones


AnyEvent = Header | Seal | Close | Roll | Drop | Quarantine | Withdraw
_PARSER: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="event")])


def encode(events: Sequence[AnyEvent], crc: int = 0) -> bytes:
    """Encode lines that follow a line with the checksum `crc`."""
    text = bytearray()
    for event in events:
        body = event.model_dump_json().encode()
        crc = zlib.crc32(body, crc)
        text += b"%08x %s\n" % (crc, body)
    return bytes(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedManifest:
    """A manifest up to its first incomplete line, and the rest."""

    events: list[AnyEvent]
    complete: bytes  # the complete lines
    crc: int  # checksum of the last complete line
    rest: bytes  # from the first incomplete line on
    more: bool  # whether `rest` holds a complete line, which no crash explains


def parse(content: bytes, path: Path) -> ParsedManifest:
    bodies, size, crc = [], 0, 0
    lines = content.splitlines(keepends=True)
    for line in lines:
        if (body := _body(line, crc)) is None:
            break
        bodies.append(body)
        crc, size = int(line[:8], 16), size + len(line)
    if bodies:
        _refuse_other_formats(bodies[0], path)
    try:
        events = [_PARSER.validate_json(body) for body in bodies]
    except ValidationError as error:
        raise InputError(f"{path} holds no event of ours: {error.errors()[0]}") from None
    return ParsedManifest(
        events=events,
        complete=content[:size],
        crc=crc,
        rest=content[size:],
        more=_complete_line_follows(lines[len(bodies) :]),
    )


def read(fs: FS, folder: Path) -> bytes:
    path = folder / NAME
    try:
        content = fs.map(path)
    except OSError:
        raise InputError(
            f"{folder} is not a store: it has no {NAME} file; "
            "give a folder made by `m3pc data` or by a run"
        ) from None
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES} bytes; it is not a manifest of ours")
    return bytes(content[:])


def _body(line: bytes, crc: int) -> bytes | None:
    """Return the JSON of a line whose checksum continues `crc`; None for any other line."""
    body = line[9:-1]
    return body if line == b"%08x %s\n" % (zlib.crc32(body, crc), body) else None


def _complete_line_follows(lines: list[bytes]) -> bool:
    """Whether a complete line follows a bad one: each checksum continues the previous line's."""
    for before, line in pairwise(lines):
        try:
            digits = int(before[:8], 16) & 0xFFFFFFFF
        except ValueError:
            continue
        if _body(line, digits) is not None:
            return True
    return False


def _refuse_other_formats(body: bytes, path: Path) -> None:
    """Refuse an unknown format by name, before its fields are reported as errors."""
    try:
        store_format = json.loads(body)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} does not begin with a header; it is not a store") from None
    if store_format not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise InputError(
            f"{path} has format {store_format!r}, this version of m3pc reads {known}; "
            "use the version that wrote it or import the data again"
        )
