"""Writers that are killed: each in a fork of this process, on a real disk, over and over again.

A child appends to a store that its predecessors left, tells through a pipe what was acknowledged,
and dies by SIGKILL: before or in the middle of some call that changes the disk, or at some moment.
The parent opens the store, compares it with all that was ever acknowledged, and starts the next.
"""

import json
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from m3pc.types import AckStatus, AppendKey
from replay.format.fs import Disk, DiskFile
from replay.format.payload import encode
from replay.store.store import Store
from replay.store.verify import verify
from replay.writing.writer import Writer, WriterOptions
from tests.support.episodes.episodes import header, numbered

HEADER = header(max_episode_steps=60)
OPTIONS = WriterOptions(segment_bytes=6000, low_space=0, no_space=0)
RECORD = struct.Struct("<IQQ")
SLOTS = 3
LIVES = 12  # of one store
SECONDS = 20  # that a child may take


class Deadly(Disk):
    """Kills its own process when a count of calls runs out: before the call, or half way."""

    def __init__(self, calls: int, *, half: bool) -> None:
        self._left, self._half = calls, half

    def create(self, path: Path) -> "DeadlyFile":
        self.step()
        return DeadlyFile(self, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def append(self, path: Path) -> "DeadlyFile":
        return DeadlyFile(self, path, os.O_RDWR)

    def rename(self, old: Path, new: Path) -> None:
        self.step()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self.step()
        super().unlink(path)

    def sync_folder(self, path: Path) -> None:
        self.step()
        super().sync_folder(path)

    def step(self, half: Callable[[], object] = lambda: None) -> None:
        self._left -= 1
        if self._left == 0:
            if self._half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyFile(DiskFile):
    def __init__(self, disk: Deadly, path: Path, flags: int) -> None:
        super().__init__(path, flags)
        self._disk = disk

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        content = b"".join(parts)
        self._disk.step(lambda: super(DeadlyFile, self).write([content[: len(content) // 2]]))
        super().write(parts)

    def write_at(self, offset: int, content: bytes) -> None:
        half = content[: len(content) // 2]
        self._disk.step(lambda: super(DeadlyFile, self).write_at(offset, half))
        super().write_at(offset, content)

    def truncate(self, size: int) -> None:
        self._disk.step()
        super().truncate(size)

    def sync(self) -> None:
        self._disk.step()
        super().sync()


def payload(key: AppendKey) -> bytes:
    """What a producer sends under a key: a function of the key."""
    rng = random.Random(repr(key))
    return encode(numbered(rng.randrange(1 << 20), rng.choice((1, 2, 7, 30, 59))))


def live(path: Path, fs: Disk, acks: int, seed: int) -> None:
    """Append groups of episodes until killed; write each acknowledged key to `acks`."""
    rng = random.Random(seed)
    writer = Writer(path, HEADER, OPTIONS, fs=fs)
    nexts = {slot: _next_key(writer, slot, rng) for slot in range(SLOTS)}
    while True:
        group = []
        for slot in rng.choices(range(SLOTS), k=rng.randrange(1, 5)):
            group.append(nexts[slot])
            nexts[slot] = nexts[slot]._replace(sequence=nexts[slot].sequence + 1)
        requests = [writer.request(key, payload(key)) for key in group]
        for key, ack in zip(group, writer.commit(requests), strict=True):
            assert ack.status is AckStatus.DURABLE, (key, ack)
            os.write(acks, RECORD.pack(*key))
        if rng.random() < 0.1:
            writer.roll()


def _next_key(writer: Writer, slot: int, rng: random.Random) -> AppendKey:
    """Go on, or start a new incarnation."""
    where = writer.producers[slot]
    if where.incarnation < 0 or rng.random() < 0.3:
        return AppendKey(slot, where.incarnation + 1, 0)
    return AppendKey(slot, where.incarnation, where.expected)


def one_life(path: Path, seed: int) -> set[AppendKey]:
    """The keys that a child acknowledged before it was killed."""
    rng = random.Random(seed)
    by_call = rng.random() < 0.5
    reader, acks = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(path, Deadly(rng.randrange(1, 120), half=rng.random() < 0.5), acks, seed, by_call)
    os.close(acks)
    if not by_call:
        time.sleep(rng.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
    content = b""
    while part := os.read(reader, 1 << 16):
        content += part
    os.close(reader)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"it ended by {status}"
    complete = len(content) // RECORD.size * RECORD.size
    return {AppendKey(*fields) for fields in RECORD.iter_unpack(content[:complete])}


def _child(path: Path, deadly: Deadly, acks: int, seed: int, by_call: bool) -> NoReturn:
    signal.alarm(SECONDS)
    try:
        live(path, deadly if by_call else Disk(), acks, seed)
    finally:
        os._exit(3)


def compare(path: Path, acked: set[AppendKey]) -> dict[str, int]:
    """Counts of what must not be, after the store was opened again; and of what is there."""
    with Writer(path, HEADER, OPTIONS) as writer:
        store = Store(path)
        rows = [row for s in store.segments if s.keys is not None for row in s.keys.tolist()]
        keys = [AppendKey(*row) for row in rows]
        gaps = sum(
            AppendKey(slot, writer.producers[slot].incarnation, n) not in set(keys)
            for slot in range(SLOTS)
            for n in range(writer.producers[slot].expected)
        )
    wrong = sum(
        encode(episode) != payload(key) for key, episode in zip(keys, store.episodes(), strict=True)
    )
    return {
        "stored": len(keys),
        "lost": len(acked - set(keys)),
        "duplicated": len(keys) - len(set(keys)),
        "gaps": gaps,
        "wrong": wrong,
        "findings": len(verify(path)),
    }


def main() -> None:
    """Standard input: {folder, points, seed}; output: totals."""
    order: dict[str, Any] = json.load(sys.stdin)
    totals: dict[str, int] = {"points": 0, "acked": 0}
    acked: set[AppendKey] = set()
    for point in range(order["points"]):
        if point % LIVES == 0:
            acked = set()
        path = Path(order["folder"]) / f"{point // LIVES:04d}"
        new = one_life(path, order["seed"] * 1_000_003 + point)
        acked |= new
        totals["points"] += 1
        totals["acked"] += len(new)
        for name, value in compare(path, acked).items():
            totals[name] = totals.get(name, 0) + value
    json.dump(totals, sys.stdout)


if __name__ == "__main__":
    main()
