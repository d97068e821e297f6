"""What the disk of a run knows, for a coordinator that has lost everything else.

RUN/replay/                            where each producer stands
RUN/weights/EPOCH-NUMBER.safetensors   what was published: the newest is what the pointer names
"""

import re
from pathlib import Path

from m3pc.core.files import sha256
from m3pc.types import Pointer, RecoveredState, Version
from replay.format import manifest
from replay.store.store import read_producers

REPLAY, WEIGHTS = "replay", "weights"  # folders of a run; the second is its pointer's name, too
NAME = re.compile(r"([0-9]{1,19})-([0-9]{1,19})\.safetensors")


def weights_path(version: Version) -> Path:
    """Of published weights, in their run."""
    return Path(WEIGHTS) / f"{version}.safetensors"


def disk_floor(run: Path) -> RecoveredState:
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
