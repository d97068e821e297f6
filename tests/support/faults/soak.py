"""A live store under a long load, and the resources that it holds: memory, files, threads, tables.

Eight producers append at once, restart now and then and begin with an invalid payload; a reader
follows and samples. Readings are taken while all of them wait, so each count has one right value.
"""

import gc
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from m3pc.core.returns import ReturnRule
from m3pc.types import AckStatus, AppendKey, Episode
from replay.format import log, manifest
from replay.format.payload import encode
from replay.format.segment import Segment
from replay.sampling.sampler import Sampler
from replay.store.store import Store
from replay.writing.group_commit import GroupCommitter
from replay.writing.writer import Writer, WriterOptions
from tests.support.episodes.episodes import header, numbered

PRODUCERS = 8
LIFETIME = 20  # episodes of an incarnation
INVALID = b"no episode"
LENGTH, BATCH = 8, 64
REFRESHES = 8  # of the reader in a round
TRIALS = 30  # until only what should be alive is alive
MANIFEST_BYTES = 1000  # a roll and a drop take less


class Before(NamedTuple):
    """What the process held before."""

    descriptors: int
    threads: int
    episodes: int  # objects
    segments: int

    @classmethod
    def now(cls) -> "Before":
        gc.collect()
        alive = objects()
        return cls(
            descriptors(), threading.active_count(), alive.count(Episode), alive.count(Segment)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    steps: int  # appended so far
    descriptors: int  # these, threads and objects: more than before the store was opened
    threads: int
    files: int  # in the store's folder
    segment_bytes: int  # on the disk
    log_bytes: int
    manifest_bytes: int
    rolls: int
    listed: int  # segments in the store
    seen: int  # segments of the reader, including chunks of the log
    episodes_alive: int  # objects in memory
    segments_alive: int
    logged: int  # episodes in the open log
    stored: int  # in segments, dropped or not, and in the log
    sent: int  # acknowledged
    slots: int  # known to the writer
    suspects: int  # those of them that sent invalid data


class Soak:
    def __init__(self, path: Path, appender: GroupCommitter, length: int) -> None:
        self._path, self._appender, self._length = path, appender, length
        self._keys = [AppendKey(slot, 0, 0) for slot in range(PRODUCERS)]
        self._pool = ThreadPoolExecutor(PRODUCERS)
        self._view: Store | None = None
        self.steps = self.sent = 0

    def round(self, episodes: int) -> None:
        """`episodes` of each producer, then the reader's turn."""
        list(self._pool.map(self._produce, range(PRODUCERS), [episodes] * PRODUCERS))
        self.sent += PRODUCERS * episodes
        self.steps += PRODUCERS * episodes * self._length
        self._view = self._view or Store(self._path)
        for _ in range(REFRESHES):
            self._view = self._view.latest()
        rule = ReturnRule(max_episode_steps=1000)
        sampler = Sampler(self._view, length=LENGTH, batch=BATCH, seed=0, returns=rule)
        states = sampler.batch(self.sent).states
        assert (np.diff(states[..., 1]) == 1).all()  # steps of one episode, in order

    def _produce(self, slot: int, episodes: int) -> None:
        payload = encode(numbered(slot, self._length))
        for _ in range(episodes):
            key = self._keys[slot]
            if key.sequence == LIFETIME:
                key = AppendKey(slot, key.incarnation + 1, 0)
                assert self._appender.append(key, INVALID).status is AckStatus.REJECTED
                key = key._replace(sequence=1)
            assert self._appender.append(key, payload).status is AckStatus.DURABLE
            self._keys[slot] = key._replace(sequence=key.sequence + 1)

    def reading(self, before: Before) -> Reading:
        writer, view = self._appender.writer, self._view
        assert view is not None
        sizes = {
            file.relative_to(self._path): file.stat().st_size
            for file in self._path.rglob("*")
            if file.is_file()
        }
        logged = sum(entry.episode is not None for entry in writer.open_entries)
        alive = self._alive(logged + before.episodes)
        return Reading(
            steps=self.steps,
            descriptors=descriptors() - before.descriptors,
            threads=threading.active_count() - before.threads,
            files=len(sizes),
            segment_bytes=sum(size for name, size in sizes.items() if name.suffix == ".arrow"),
            log_bytes=sizes[Path(log.FOLDER) / log.file_name(writer.index.rolls)],
            manifest_bytes=sizes[Path(manifest.NAME)],
            rolls=writer.index.rolls,
            listed=len(writer.index.segments),
            seen=len(view.segments),
            episodes_alive=alive.count(Episode) - before.episodes,
            segments_alive=alive.count(Segment) - before.segments,
            logged=logged,
            stored=writer.index.totals.episodes + logged,
            sent=self.sent,
            slots=writer.producers.known_slots,
            suspects=writer.producers.suspected_slots,
        )

    def _alive(self, episodes: int) -> list[type]:
        """Types of the live objects. The committer replies before it frees what it has saved."""
        for _ in range(TRIALS):
            alive = objects()
            if alive.count(Episode) == episodes:
                break
            time.sleep(0.01)
        return alive

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def soaked(path: Path, options: WriterOptions, length: int) -> Iterator[Soak]:
    with GroupCommitter(Writer(path, header(), options), deadline=60.0) as appender:
        soak = Soak(path, appender, length)
        try:
            yield soak
        finally:
            soak.close()


def check_counts(now: Reading, options: WriterOptions) -> None:
    """Counts with one right value, and counts with a constant bound."""
    assert options.keep_bytes is not None
    right = {
        "episodes stored": now.stored == now.sent,
        "files": now.files == 2 * now.listed + 3,  # the log, the manifest, the mark
        "bytes of segments": now.segment_bytes <= options.keep_bytes,
        "bytes of the log": now.log_bytes < 2 * options.segment_bytes,
        "bytes of the manifest": now.manifest_bytes <= MANIFEST_BYTES * (now.rolls + 1),
        # the committer's own, and as many of the pool as were ever needed at once
        "threads": 1 <= now.threads <= PRODUCERS + 1,
        "chunks of the log": 0 <= now.seen - now.listed <= 16,
        # log, manifest, mark and lock, and what the reader has mapped
        "descriptors": now.descriptors == 4 + 2 * now.listed,
        "segments in memory": now.segments_alive == now.seen,
        "episodes in memory": now.episodes_alive == now.logged,
        "slots": now.slots == PRODUCERS,
        "suspects": now.suspects <= PRODUCERS,
    }
    wrong = [name for name, holds in right.items() if not holds]
    assert not wrong, f"wrong: {', '.join(wrong)}; {now}"


def slope(steps: Sequence[int], values: Sequence[int]) -> float:
    """The Theil-Sen estimator: the median over all pairs, robust against spikes."""
    x, y = np.array(steps, float), np.array(values, float)
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def objects() -> list[type]:
    """The type of each live object."""
    return [type(item) for item in gc.get_objects()]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
