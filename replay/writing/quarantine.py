"""Finds damaged segments and sets their files aside. Nothing is deleted."""

from pathlib import Path

from replay.format.fs import FS
from replay.format.index import SegmentEntry
from replay.format.segment import FOLDER as SEGMENTS
from replay.store import recovery
from replay.store.recovery import QUARANTINE
from replay.store.verify import damaged_files


def find_damage(fs: FS, path: Path, entry: SegmentEntry) -> str:
    """Describe damage to a segment's files; empty if they are intact."""
    return next((finding.what for finding in damaged_files(fs, path, entry)), "")


def move_files(fs: FS, path: Path, entry: SegmentEntry) -> None:
    """Move a segment's files to the quarantine folder and sync; first record it in the manifest."""
    for file in (entry.steps, entry.episodes):
        if file.name in fs.names(path / SEGMENTS):
            recovery.set_aside(fs, path, file.name)
    for folder in (SEGMENTS, QUARANTINE):
        fs.sync_folder(path / folder)
