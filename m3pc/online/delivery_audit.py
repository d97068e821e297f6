"""What the actors say was acknowledged, against what the store holds: each once, byte for byte."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from m3pc.online.run_folder import open_run
from m3pc.types import AppendKey
from replay.format.payload import encode
from replay.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Nothing lost, duplicated, changed or missing between two: all of these are empty."""

    acknowledged: int  # episodes, by the actors' own logs
    stored: int  # episodes
    lost: list[AppendKey] = field(default_factory=list)
    duplicated: list[AppendKey] = field(default_factory=list)
    changed: list[AppendKey] = field(default_factory=list)
    gaps: list[AppendKey] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.lost or self.duplicated or self.changed or self.gaps)

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} episodes were acknowledged and {self.stored} are stored: "
            f"{len(self.lost)} lost, {len(self.duplicated)} duplicated, "
            f"{len(self.changed)} changed, {len(self.gaps)} missing between two"
        )


def audit(run: Path) -> Audit:
    """Of a run with fleet.receipts, while it runs or after it: receipts are read first."""
    receipts = _receipts(open_run(run).receipts(0).parent)
    store = Store(run / "replay")
    keys = store.keys
    counts = Counter(keys)
    digests = {
        key: hashlib.sha256(encode(episode)).hexdigest()
        for key, episode in zip(keys, store.episodes(), strict=True)
        if key in receipts
    }
    return Audit(
        acknowledged=len(receipts),
        stored=len(keys),
        lost=sorted(receipts.keys() - counts.keys()),
        duplicated=sorted(key for key, count in counts.items() if count > 1),
        changed=sorted(key for key, digest in digests.items() if digest != receipts[key]),
        gaps=_gaps(counts),
    )


def _receipts(folder: Path) -> dict[AppendKey, str]:
    """SHA-256 of each acknowledged payload; a line that a kill cut short is left out."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                key = AppendKey(row["slot"], row["incarnation"], row["sequence"])
                found[key] = str(row["sha256"])
    return found


def _gaps(keys: Counter[AppendKey]) -> list[AppendKey]:
    """Episodes that are not there though a later one of their producer is."""
    ends: dict[tuple[int, int], int] = {}
    for slot, incarnation, sequence in keys:
        ends[slot, incarnation] = max(ends.get((slot, incarnation), 0), sequence)
    return sorted(
        key
        for (slot, incarnation), last in ends.items()
        for sequence in range(last)
        if (key := AppendKey(slot, incarnation, sequence)) not in keys
    )
