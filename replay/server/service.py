"""A run's store, served: episodes come in, and the learner is told how many updates they allow."""

import logging
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

SEGMENT_BYTES = 16 << 20  # of log: appends wait for about a quarter of a second when it is full
LONGEST_WAIT = 1.0  # seconds that either side waits for the other before it is told to ask again

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTotals:
    """Counts go over all that was ever stored, each episode once, also what retention dropped."""

    episodes: int
    steps: int
    terminated: int  # episodes
    truncated: int
    aborted: int
    held_steps: int  # that are in the store now
    bytes: int  # of the store now
    granted: int  # updates that the learner may have done


class StoreService:
    """An EpisodeSink for any number of threads, at whose door a limiter stands.

    After a BrokenStoreError nothing works any more: end the process; what opens the store next
    recovers all that was acknowledged, and counts it again.
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
        wait: float = LONGEST_WAIT,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Waits here end before a caller's own deadline of `fleet.deadline` does."""
        self._fs, self._clock = fs or Disk(), clock
        self._schedule = schedule_of(online, header.max_episode_steps)
        self._wait = min(wait, fleet.deadline / 4)
        self._recorder, self._reporting = Recorder(), threading.Lock()
        self._writer = self._opened(path, header, options or options_of(fleet))
        self._gate = RateLimiter(
            SampleInsertRatio(self._schedule.limits(), inserts=self._inserts()),
            without_actors=online.without_actors,
            patience=patience,
            clock=clock,
        )
        self._reported, self._closed = self._writer.totals.steps, False
        self._appender = GroupCommitter(
            self._writer, deadline=fleet.deadline / 2, recorder=self._recorder
        )
        self._scrubber = Scrubber(self._appender)

    def _opened(self, path: Path | str, header: Header, options: WriterOptions) -> Writer:
        begin = self._clock()
        writer = Writer(path, header, options, fs=self._fs)
        self._recorder.set(RECOVERY_SECONDS, self._clock() - begin)
        self._recorder.add(TORN_BYTES, writer.torn_bytes)
        return writer

    @property
    def gate(self) -> RateLimiter:
        return self._gate

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        begin = self._clock()
        ack = self._append(AppendKey(*key), payload)
        self._recorder.add(APPENDS, label=ack.status.value)
        self._recorder.observe(APPEND_SECONDS, self._clock() - begin)
        return ack

    def _append(self, key: AppendKey, payload: bytes) -> Ack:
        """What is not the next of its producer never comes to the gate, nor what is no episode."""
        early = self._writer.early(key)
        if early is not None:
            return early
        request = self._writer.request(key, payload)
        if isinstance(request.content, PayloadError):
            return self._appender.commit(request)
        units = self._schedule.units(len(request.content))
        if not self._gate.reserve(units, self._wait):
            return self._writer.later(key, "the learner is behind; send it again")
        return self._appender.commit(request, lambda: self._gate.settle(units, self._inserts()))

    def may_update(self, epoch: int, done: int, total: int, timeout: float = LONGEST_WAIT) -> int:
        """How many updates a learner that has done so many may have done in all, of the `total`
        that it wants to have.

        It waits until this is more than was ever granted. Asking again, also while an earlier call
        waits, changes nothing. A newer epoch that has done less has lost what was done since: the
        count goes back. FencedError for an older epoch.
        """
        self._writer.require_whole()
        return self._gate.grant(epoch, done, total, min(timeout, self._wait))

    def set_slack(self, steps: int) -> None:
        """While the run goes on: how far either side may run ahead."""
        self._schedule = replace(self._schedule, slack=steps)
        self._gate.change(self._schedule.limits())

    def totals(self) -> StoreTotals:
        self._writer.require_whole()
        found, gate = self._writer.totals, self._gate
        return StoreTotals(
            **found._asdict(),
            aborted=found.aborted,
            held_steps=self._writer.steps,
            bytes=self._writer.size,
            granted=gate.granted,
        )

    def report(self) -> Snapshot:
        self._writer.require_whole()
        with self._reporting:
            steps = self._writer.totals.steps
            self._recorder.add(INSERTED, steps - self._reported)
            self._reported = steps
        self._recorder.set(REPLAY_STEPS, self._writer.steps)
        self._recorder.set(REPLAY_BYTES, self._writer.size)
        listing = self._writer.listing
        self._recorder.set(SEGMENTS, len(listing.segments), "sealed")
        self._recorder.set(SEGMENTS, len(listing.quarantined), "quarantined")
        self._recorder.set(DISK_FREE, self._fs.free_bytes(self._writer.path))
        self._recorder.set(LIMITER_ERROR, float(self._gate.limiter.error))
        self._recorder.set(WRITER_BLOCKED, float(self._gate.waiting > 0))
        return self._recorder.snapshot()

    def close(self) -> None:
        """End in order; again, nothing. Whoever calls sees to it that nothing more is asked."""
        with self._reporting:
            closed, self._closed = self._closed, True
        if not closed:
            self._scrubber.close()
            self._appender.close()

    def __enter__(self) -> "StoreService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _inserts(self) -> int:
        totals = self._writer.totals
        return self._schedule.units(totals.steps, totals.episodes)


def options_of(fleet: FleetConfig) -> WriterOptions:
    return WriterOptions(
        durability=fleet.durability,
        segment_bytes=SEGMENT_BYTES,
        keep_episodes=fleet.keep_episodes or None,
    )
