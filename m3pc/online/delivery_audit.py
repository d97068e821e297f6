"""Checks that each episode listed by actors as acknowledged is stored once, with the same bytes."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from m3pc.online.run_folder import open_run
from m3pc.types import AppendKey, InputError
from replay.format.payload import encode
from replay.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryAudit:
    """Numbers of episodes, and the keys of those with a fault."""

    acknowledged: int  # according to the actors' own logs
    stored: int
    lost: list[AppendKey] = field(default_factory=list)  # acknowledged, but not stored
    duplicated: list[AppendKey] = field(default_factory=list)  # stored more than once
    changed: list[AppendKey] = field(default_factory=list)  # stored with other bytes
    gaps: list[AppendKey] = field(default_factory=list)  # missing before a stored sequence number

    @property
    def faults(self) -> dict[str, list[AppendKey]]:
        """Keys by kind of fault."""
        return {
            "lost": self.lost,
            "duplicated": self.duplicated,
            "changed": self.changed,
            "missing before a later one": self.gaps,
        }

    @property
    def sound(self) -> bool:
        """Whether no episode has a fault."""
        return not any(self.faults.values())

    def __str__(self) -> str:
        faults = ", ".join(f"{len(keys)} {fault}" for fault, keys in self.faults.items())
        return (
            f"{self.acknowledged} episodes were acknowledged and {self.stored} are stored: {faults}"
        )


def audit_deliveries(run: Path) -> DeliveryAudit:
    """Audit a run with fleet.receipts, even while it runs: the logs are read before the store."""
    opened = open_run(run)
    if opened.config.fleet.keep_episodes:
        raise InputError(
            f"{run} has fleet.keep_episodes = {opened.config.fleet.keep_episodes}: old episodes "
            "are deleted on purpose, which looks like a loss; audit a run that keeps all"
        )
    logs = opened.ack_log(0).parent
    if not logs.is_dir():
        raise InputError(
            f"{logs} does not exist: the actors listed nothing; finetune with --set "
            "fleet.receipts=true"
        )
    acknowledged = _read_ack_logs(logs)
    store = Store(opened.replay)
    keys = store.keys
    counts = Counter(keys)
    digests = {
        key: hashlib.sha256(encode(episode)).hexdigest()
        for key, episode in zip(keys, store.episodes(), strict=True)
        if key in acknowledged
    }
    return DeliveryAudit(
        acknowledged=len(acknowledged),
        stored=len(keys),
        lost=sorted(acknowledged.keys() - counts.keys()),
        duplicated=sorted(key for key, count in counts.items() if count > 1),
        changed=sorted(key for key, digest in digests.items() if digest != acknowledged[key]),
        gaps=_gaps(counts),
    )


def _read_ack_logs(folder: Path) -> dict[AppendKey, str]:
    """SHA-256 of each acknowledged payload; a line that a kill left incomplete is ignored."""
    digests = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                key = AppendKey(row["slot"], row["incarnation"], row["sequence"])
                digests[key] = str(row["sha256"])
    return digests


def _gaps(keys: Counter[AppendKey]) -> list[AppendKey]:
    """Missing episodes before a stored one of the same producer."""
    newest: dict[tuple[int, int], int] = {}
    for slot, incarnation, sequence in keys:
        newest[slot, incarnation] = max(newest.get((slot, incarnation), 0), sequence)
    return sorted(
        key
        for (slot, incarnation), last in newest.items()
        for sequence in range(last)
        if (key := AppendKey(slot, incarnation, sequence)) not in keys
    )
