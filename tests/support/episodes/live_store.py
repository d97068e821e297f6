"""A small live store: six episodes of two producers in two segments and a log, and one refused."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from m3pc.types import AckStatus, AppendKey, Episode
from replay.format.payload import encode
from replay.writing.writer import Writer
from tests.support.episodes.episodes import header, numbered
from tests.support.episodes.shared_data import ROOT
from tests.support.faults.live_writer import ROOMY

KILLED = -9
# Episode k is the (k // 2)-th of slot k % 2; two episodes a segment, two in the log.
EPISODES: Mapping[AppendKey, Episode] = {
    AppendKey(k % 2, 3, k // 2): numbered(k, 5 + k, terminated=k == 1) for k in range(6)
}
REFUSED = AppendKey(1, 3, 3)
FILES = [
    "MANIFEST",
    "MARK",
    "log/000002.log",
    *(f"segments/{i:06d}.{kind}.arrow" for i in (0, 1) for kind in ("steps", "episodes")),
]


def fill(path: Path) -> Writer:
    """The store, still open."""
    writer = Writer(path, header(), ROOMY)
    for k, (key, episode) in enumerate(EPISODES.items()):
        assert writer.append(key, encode(episode)).status is AckStatus.DURABLE
        if k in (1, 3):
            writer.roll()
    assert writer.append(REFUSED, bytes(80)).status is AckStatus.REJECTED
    return writer


def closed(path: Path) -> Path:
    fill(path).close()
    return path


def left_by_kill(path: Path) -> Path:
    """The same after kill -9 of its writer."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.episodes.live_store", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    with child, child.stdout as ready:
        assert ready.readline() == b"filled\n"
        child.kill()
    assert child.returncode == KILLED
    return path


if __name__ == "__main__":
    writer = fill(Path(sys.argv[1]))
    sys.stdout.write("filled\n")
    sys.stdout.flush()
    time.sleep(60)
