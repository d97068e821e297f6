"""Serves a run's store: takes episodes and says how many updates the learner may do."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from m3pc.config.schema import FleetConfig, OnlineConfig
from m3pc.telemetry.catalogue import (
    APPEND_SECONDS,
    APPENDS,
    DISK_FREE,
    INSERTED,
    LIMITER_ERROR,
    RECOVERY_SECONDS,
    REPLAY_BYTES,
    REPLAY_STEPS,
    SEGMENTS,
    TORN_BYTES,
    WRITER_BLOCKED,
)
from m3pc.telemetry.recorder import Recorder, Snapshot
from m3pc.types import Ack, AppendKey
from replay.format.fs import FS, Disk
from replay.format.manifest import Header
from replay.format.payload import PayloadError
from replay.server.rate_limiter import RateLimiter
from replay.server.sample_ratio import SampleInsertRatio
from replay.server.schedule import schedule_of
from replay.writing.group_commit import GroupCommitter
from replay.writing.scrubber import Scrubber
from replay.writing.writer import Writer, WriterOptions

SEGMENT_BYTES = 16 << 20  # appends wait about 0.25 s when a log of this size is full
MAX_WAIT = 1.0  # seconds that either side waits for the other before it must ask again


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTotals:
    """Counts over all episodes ever stored, including dropped ones; each counts once."""

    episodes: int
    steps: int
    terminated: int  # episodes
    truncated: int
    aborted: int
    held_steps: int  # in the store now
    bytes: int  # size of the store now
    granted: int  # updates that the learner may have done in all


class StoreService:
    """An EpisodeSink for any number of threads, behind a rate limiter.

    After a BrokenStoreError every call fails: end the process. The next process that opens the
    store recovers and counts everything that was acknowledged.
    """

    def __init__(
        self,
        path: Path | str,
        header: Header,
        online: OnlineConfig,
        fleet: FleetConfig,
        *,
        options: WriterOptions | None = None,
        fs: FS | None = None,
        wait: float = MAX_WAIT,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Every wait here ends before the caller's own deadline, `fleet.deadline`."""
        self._fs, self._clock = fs or Disk(), clock
        self._schedule = schedule_of(online, header.max_episode_steps)
        self.max_wait = min(wait, fleet.deadline / 4)
        self._recorder, self._reporting = Recorder(), threading.Lock()
        begin = clock()
        self._writer = Writer(path, header, options or writer_options(fleet), fs=self._fs)
        self._recorder.set(RECOVERY_SECONDS, clock() - begin)
        self._recorder.add(TORN_BYTES, self._writer.torn_bytes)
        self.rate_limiter = RateLimiter(
            SampleInsertRatio(self._schedule.limits(), inserts=self._inserts()),
            without_actors=online.without_actors,
            patience=patience,
            clock=clock,
        )
        self._reported, self._closed = self._writer.totals.steps, False
        self.committer = GroupCommitter(
            self._writer, deadline=fleet.deadline / 2, recorder=self._recorder
        )
        self._scrubber = Scrubber(self.committer)

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        begin = self._clock()
        ack = self._append(AppendKey(*key), payload)
        self._recorder.add(APPENDS, label=ack.status.value)
        self._recorder.observe(APPEND_SECONDS, self._clock() - begin)
        return ack

    def _append(self, key: AppendKey, payload: bytes) -> Ack:
        """Only a producer's next valid episode may have to wait for the learner: duplicates, gaps
        and invalid payloads do not."""
        reply = self._writer.reply_without_payload(key)
        if reply is not None:
            return reply
        request = self._writer.request(key, payload)
        if isinstance(request.content, PayloadError):
            return self.committer.commit(request)
        units = self._schedule.units(len(request.content))
        if not self.rate_limiter.reserve(units, self.max_wait):
            return self._writer.retry_later(key, "the learner is behind; send it again")
        return self.committer.commit(
            request, lambda: self.rate_limiter.settle(units, self._inserts())
        )

    def may_update(self, epoch: int, done: int, total: int, timeout: float = MAX_WAIT) -> int:
        """Return how many updates, up to `total`, a learner that has done `done` may do in all.

        Waits, up to `timeout`, for more than was granted before. Asking again, also while an
        earlier call waits, changes nothing. A learner of a newer epoch that has done less has lost
        updates: the count goes back. FencedError: a newer epoch has begun.
        """
        self._writer.require_working()
        return self.rate_limiter.grant(epoch, done, total, min(timeout, self.max_wait))

    def set_slack(self, steps: int) -> None:
        """Set how many extra steps collecting may run ahead of learning."""
        self._schedule = replace(self._schedule, slack=steps)
        self.rate_limiter.set_limits(self._schedule.limits())

    def totals(self) -> StoreTotals:
        self._writer.require_working()
        stored = self._writer.totals
        return StoreTotals(
            **stored._asdict(),
            aborted=stored.aborted,
            held_steps=self._writer.steps,
            bytes=self._writer.size,
            granted=self.rate_limiter.granted,
        )

    def report(self) -> Snapshot:
        self._writer.require_working()
        with self._reporting:
            steps = self._writer.totals.steps
            self._recorder.add(INSERTED, steps - self._reported)
            self._reported = steps
        self._recorder.set(REPLAY_STEPS, self._writer.steps)
        self._recorder.set(REPLAY_BYTES, self._writer.size)
        index = self._writer.index
        self._recorder.set(SEGMENTS, len(index.segments), "sealed")
        self._recorder.set(SEGMENTS, len(index.quarantined), "quarantined")
        self._recorder.set(DISK_FREE, self._fs.free_bytes(self._writer.path))
        self._recorder.set(LIMITER_ERROR, float(self.rate_limiter.ratio.error))
        self._recorder.set(WRITER_BLOCKED, float(self.rate_limiter.waiting > 0))
        return self._recorder.snapshot()

    def close(self) -> None:
        """Close the store; a second call does nothing. Other calls are not allowed afterwards."""
        with self._reporting:
            closed, self._closed = self._closed, True
        if not closed:
            self._scrubber.close()
            self.committer.close()

    def __enter__(self) -> "StoreService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _inserts(self) -> int:
        totals = self._writer.totals
        return self._schedule.units(totals.steps, totals.episodes)


def writer_options(fleet: FleetConfig) -> WriterOptions:
    return WriterOptions(
        durability=fleet.durability,
        segment_bytes=SEGMENT_BYTES,
        keep_episodes=fleet.keep_episodes or None,
    )
