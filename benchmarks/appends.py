"""Producers that append as fast as they get replies, all in one process."""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.traffic import HEADER, Audit, Parcel, Sent, audit
from benchmarks.unprotected_store import unprotected
from m3pc.types import Ack, AckStatus, AppendKey
from replay.writing.group_commit import GroupCommitter
from replay.writing.writer import AppendRequest, Writer, WriterOptions

Mode = Literal["fsync", "os", "off"]  # off: without any protection
MODES: tuple[Mode, ...] = ("fsync", "os", "off")
BLOCK = 4096  # bytes
SEGMENT_BYTES = 8 << 20  # of log: small enough that it rolls now and then


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    seconds: float
    waits: list[float]  # seconds, one per acknowledgement
    groups: int  # commits
    bytes: int  # of payload
    audit: Audit


class Counting(Writer):
    groups = 0

    def commit(self, requests: Sequence[AppendRequest]) -> list[Ack]:
        self.groups += 1
        return super().commit(requests)


def burst(path: Path, mode: Mode, producers: int, seconds: float, parcels: list[Parcel]) -> Burst:
    """A new store at `path`; every producer waits for each reply before it sends the next."""
    options = WriterOptions(
        durability="fsync" if mode == "fsync" else "os",
        segment_bytes=SEGMENT_BYTES,
        no_space=0,
        low_space=0,
    )
    waits: list[list[float]] = [[] for _ in range(producers)]
    with (
        unprotected() if mode == "off" else nullcontext(),
        GroupCommitter(writer := Counting(path, HEADER, options)) as appender,
        ThreadPoolExecutor(producers) as pool,
    ):
        start = threading.Barrier(producers)

        def produce(slot: int) -> Sent:
            start.wait()
            sequence, steps, end = 0, 0, time.perf_counter() + seconds
            while (begin := time.perf_counter()) < end:
                parcel = parcels[(slot + sequence) % len(parcels)]
                ack = appender.append(AppendKey(slot, 0, sequence), parcel.payload)
                assert ack.status is AckStatus.DURABLE, ack
                waits[slot].append(time.perf_counter() - begin)
                sequence, steps = sequence + 1, steps + parcel.steps
            return Sent(sequence, steps)

        begin = time.perf_counter()
        sent = list(pool.map(produce, range(producers)))
        took = time.perf_counter() - begin
    sizes = [len(parcel.payload) for parcel in parcels]
    return Burst(
        seconds=took,
        waits=[wait for mine in waits for wait in mine],
        groups=writer.groups,
        bytes=sum(
            sizes[(slot + sequence) % len(sizes)]
            for slot, (episodes, _) in enumerate(sent)
            for sequence in range(episodes)
        ),
        audit=_audit(path, mode, sent),
    )


def _audit(path: Path, mode: Mode, sent: list[Sent]) -> Audit:
    with unprotected() if mode == "off" else nullcontext():
        return audit(path, sent)


def roll_seconds(path: Path, size: int, parcels: list[Parcel]) -> float:
    """How long appends wait while a log of `size` bytes becomes a segment."""
    options = WriterOptions(durability="os", segment_bytes=2 * size, no_space=0, low_space=0)
    with Writer(path, HEADER, options) as writer:
        sequence = written = 0
        while written < size:
            payload = parcels[sequence % len(parcels)].payload
            assert writer.append(AppendKey(0, 0, sequence), payload).status is AckStatus.DURABLE
            sequence, written = sequence + 1, written + len(payload)
        begin = time.perf_counter()
        writer.roll()
        return time.perf_counter() - begin


def raw_syncs(folder: Path, count: int) -> list[float]:
    """Seconds for each of `count` blocks appended to a file and synced: no commit can be faster."""
    waits, block = [], bytes(BLOCK)
    with open(folder / "raw", "wb", buffering=0) as file:
        for _ in range(count):
            begin = time.perf_counter()
            file.write(block)
            os.fdatasync(file.fileno())
            waits.append(time.perf_counter() - begin)
    return waits
