"""Stores whose files and manifest were changed together, so that checksums still fit."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from replay.format import manifest
from replay.format.manifest import AnyEvent, FileEntry, Seal


def reseal(store: Path, change: Callable[[list[AnyEvent]], object]) -> None:
    """Change the events of a store's manifest; their checksums are computed again."""
    path = store / manifest.NAME
    events = manifest.parse(path.read_bytes(), path).events
    change(events)
    path.write_bytes(manifest.encode(events))


def replace_segment_file(store: Path, name: str, content: bytes) -> None:
    """Replace the bytes of a file of segment 0, and its hash in the manifest."""
    (store / "segments" / name).write_bytes(content)

    def change(events: list[AnyEvent]) -> None:
        seal = events[1]
        assert isinstance(seal, Seal)
        kind = name.split(".")[1]
        entry: FileEntry = getattr(seal, kind)
        new = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        events[1] = seal.model_copy(update={kind: entry.model_copy(update=new)})

    reseal(store, change)
