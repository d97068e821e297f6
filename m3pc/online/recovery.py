"""Reads from a run's folder what a coordinator needs after it lost its own records.

RUN/replay/                            the newest incarnation of each producer
RUN/weights/EPOCH-NUMBER.safetensors   published weights; the pointer names the newest
"""

import re
from pathlib import Path

from m3pc.core.files import sha256
from m3pc.types import Pointer, RecoveredState, Version
from replay.format import manifest
from replay.store.store import read_producers

REPLAY, WEIGHTS = "replay", "weights"  # folders of a run; WEIGHTS is also the pointer's name
NAME = re.compile(r"([0-9]{1,19})-([0-9]{1,19})\.safetensors")


def weights_path(version: Version) -> Path:
    """The file of a published version, relative to its run."""
    return Path(WEIGHTS) / f"{version}.safetensors"


def recover_from_disk(run: Path) -> RecoveredState:
    """Incarnations and pointer that the coordinator must not fall behind."""
    store = run / REPLAY
    producers = read_producers(store) if (store / manifest.NAME).exists() else {}
    newest = _newest_weights(run)
    return RecoveredState(
        incarnations={slot: producer.incarnation for slot, producer in producers.items()},
        pointers={WEIGHTS: newest} if newest else {},
    )


def _newest_weights(run: Path) -> Pointer | None:
    names = map(NAME.fullmatch, (path.name for path in (run / WEIGHTS).glob("*.safetensors")))
    versions = [Version(epoch=int(name[1]), number=int(name[2])) for name in names if name]
    if not versions:
        return None
    newest = max(versions)
    path = run / weights_path(newest)
    return Pointer(
        version=newest,
        sha256=sha256(path),
        size=path.stat().st_size,
        path=str(weights_path(newest)),
    )
