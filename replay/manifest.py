"""The list of what a store holds: an append-only text file, one checked JSON event a line.

    9a0c1f2e {"event": "open", ...}       sizes, source, format
    51d0b7aa {"event": "seal", ...}       one segment: rows, bytes and SHA-256 of its two files
    e2f6c411 {"event": "close", ...}      totals: nothing more will come

The eight digits are the CRC-32 of all that stands before the line and of the line's JSON, so a
changed, lost, added or swapped line shows.
"""

import json
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from m3pc.types import InputError
from replay.schema import FORMAT

NAME = "MANIFEST"
LARGEST = 64 << 20  # bytes; about 200,000 segments


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Header(Event):
    """What every episode in the store has in common."""

    event: Literal["open"] = "open"
    format: int = FORMAT
    states: int = Field(ge=1, le=65_536)  # S
    actions: int = Field(ge=1, le=65_536)  # A
    horizon: int = Field(ge=1)  # H, the environment's step limit
    env: str | None  # where the episodes were recorded, if known
    source: dict[str, Any]  # where they came from: kind, name, hash, options


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


AnyEvent = Annotated[Header | Seal | Close, Field(discriminator="event")]
_PARSER: TypeAdapter[Header | Seal | Close] = TypeAdapter(AnyEvent)


def encode(events: list[Header | Seal | Close]) -> bytes:
    text, crc = bytearray(), 0
    for event in events:
        body = event.model_dump_json().encode()
        crc = zlib.crc32(body, crc)
        text += b"%08x %s\n" % (crc, body)
    return bytes(text)


def read(folder: Path) -> tuple[Header, list[Seal], Close]:
    """Header, segments and totals of a closed store."""
    path = folder / NAME
    if not path.is_file() or path.is_symlink():
        raise InputError(
            f"{folder} is not a store: it has no {NAME} file; give a folder made by `m3pc data`"
        )
    if path.stat().st_size > LARGEST:
        raise InputError(f"{path} is larger than {LARGEST} bytes; it is not a manifest of ours")
    events = _parse(path.read_bytes(), path)
    match events:
        case [Header() as header, *seals, Close() as close] if seals and all(
            isinstance(seal, Seal) for seal in seals
        ):
            return header, [seal for seal in seals if isinstance(seal, Seal)], close
    raise InputError(
        f"{path} is not whole: expected a header, segments and a closing line, found "
        f"{[event.event for event in events][-3:]} at its end; make or import the data again"
    )


def _parse(content: bytes, path: Path) -> list[Header | Seal | Close]:
    bodies = _checked_lines(content, path)
    _refuse_other_formats(bodies[0], path)
    try:
        return [_PARSER.validate_json(body) for body in bodies]
    except ValidationError as error:
        raise InputError(f"{path} holds no event of format {FORMAT}: {error.errors()[0]}") from None


def _checked_lines(content: bytes, path: Path) -> list[bytes]:
    bodies, crc = [], 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        body = line[9:-1]
        crc = zlib.crc32(body, crc)
        if line != b"%08x %s\n" % (crc, body):
            raise InputError(
                f"{path} line {number} was changed or cut: its checksum is wrong; "
                "make or import the data again"
            )
        bodies.append(body)
    if not bodies:
        raise InputError(f"{path} is empty; make or import the data again")
    return bodies


def _refuse_other_formats(body: bytes, path: Path) -> None:
    """Say so before the fields of a format that we do not know are taken for errors."""
    try:
        found = json.loads(body)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} does not begin with a header; it is not a store") from None
    if found != FORMAT:
        raise InputError(
            f"{path} has format {found!r}, this version of m3pc reads {FORMAT}; "
            "use the version that wrote it or import the data again"
        )
