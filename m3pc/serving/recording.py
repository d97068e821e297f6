"""Stores robots' episodes in a replay store, each exactly once, in its robot's producer slot.

The episodes can be sampled, dropped by slot and exported like those of rollout actors.
"""

import logging
import threading
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from actors.outbox import Outbox
from m3pc.model.weights import Weights
from m3pc.telemetry.recorder import Recorder, Snapshot, merge
from m3pc.types import AppendKey, Episode, InputError
from replay.format.fs import FS
from replay.format.manifest import Header
from replay.format.payload import encode
from replay.format.validation import check_episode
from replay.writing.group_commit import GroupCommitter
from replay.writing.writer import Writer, WriterOptions

ANONYMOUS: Final = 0  # slot of robots without a name
RETRY: Final = "end the session again, later"

log = logging.getLogger(__name__)

StoreOutcome = Literal["durable", "waiting", "rejected"]


class StoreBusyError(RuntimeError):
    """The episode was refused, because too many wait for the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    outcome: StoreOutcome
    slot: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingLimits:
    put_seconds: float = 1.0  # longest wait for room in a robot's outbox
    ack_seconds: float = 5.0  # longest wait for the disk; then the outcome is "waiting"
    flush_seconds: float = 20.0  # time to flush all outboxes, in parallel, at the end
    max_outboxes: int = 256  # one per robot whose episodes wait for the disk; each has a thread


class EpisodeRecording:
    """Writes episodes to a store, which it owns until `close`. Thread-safe."""

    def __init__(
        self,
        path: Path,
        weights: Weights,
        *,
        limits: RecordingLimits | None = None,
        fs: FS | None = None,
    ) -> None:
        self.limits = limits or RecordingLimits()
        self._header = Header(
            states=weights.state_size,
            actions=weights.action_size,
            max_episode_steps=weights.max_episode_steps,
            env=weights.env,
            source={"kind": "robots"},
        )
        self._recorder = Recorder()
        writer = Writer(path, self._header, WriterOptions(durability="fsync"), fs=fs)
        self._committer = GroupCommitter(writer, recorder=self._recorder)
        self._lock = threading.Lock()  # guards the fields below; never held during a wait for disk
        self._outboxes: dict[int, _RobotOutbox] = {}
        self._closed_outboxes: Snapshot = {}  # metrics of outboxes that were removed
        self._lost = 0

    @property
    def outboxes(self) -> int:
        with self._lock:
            return len(self._outboxes)

    @property
    def unacked(self) -> int:
        """Episodes that wait for the disk."""
        with self._lock:
            return sum(outbox.unacked for outbox in self._outboxes.values())

    @property
    def lost(self) -> int:
        """Episodes that were not stored and whose robots were not informed."""
        return self._lost

    def store(self, name: str | None, episode: Episode) -> StoreResult:
        """Store an episode. After `ack_seconds` the outcome is "waiting" and it is stored later.

        StoreBusyError: not stored, try again. OSError: the store is broken.
        """
        slot = slot_of(name)
        try:
            check_episode(episode, self._header, number=0)
        except InputError as error:
            return StoreResult(outcome="rejected", slot=slot, reason=str(error))
        answer = self._put(slot, episode, self.limits.put_seconds)
        try:
            reason = answer.result(self.limits.ack_seconds)
        except TimeoutError:
            self._committer.writer.require_working()
            reason = "the disk has not answered yet; the server's log says why"
            return StoreResult(outcome="waiting", slot=slot, reason=reason)
        return StoreResult(outcome="rejected" if reason else "durable", slot=slot, reason=reason)

    def store_later(
        self, name: str | None, episode: Episode, put_seconds: float | None = None
    ) -> None:
        """Store an episode that no robot waits for; a failure is logged and counted."""
        seconds = self.limits.put_seconds if put_seconds is None else put_seconds
        try:
            check_episode(episode, self._header, number=0)
            answer = self._put(slot_of(name), episode, seconds)
        except (InputError, StoreBusyError, OSError) as error:
            self._count_loss(name, str(error))
        else:
            answer.add_done_callback(lambda done: self._count_loss(name, done.result()))

    def snapshot(self) -> Snapshot:
        with self._lock:
            closed, outboxes = self._closed_outboxes, list(self._outboxes.values())
        recorders = [self._recorder, *(outbox.recorder for outbox in outboxes)]
        return merge([closed, *(recorder.snapshot() for recorder in recorders)])

    @property
    def broken(self) -> bool:
        """Whether nothing can be stored until the server is restarted."""
        try:
            self._committer.writer.require_working()
        except OSError:
            return True
        return False

    def close(self) -> int:
        """Flush and close; return the number of episodes that are not stored."""
        with self._lock:
            outboxes = list(self._outboxes.values())
        with ThreadPoolExecutor(max(len(outboxes), 1)) as pool:
            seconds = 0.0 if self.broken else self.limits.flush_seconds
            closing = [pool.submit(outbox.close, seconds) for outbox in outboxes]
            unacked = sum(future.result() for future in closing)
        self._committer.close()
        return unacked + self._lost

    def _put(self, slot: int, episode: Episode, seconds: float) -> "Future[str]":
        """The future resolves to "" once the episode is stored, else to the reason why not."""
        self._committer.writer.require_working()
        payload = encode(episode)
        outbox = self._borrow_outbox(slot)
        try:
            return outbox.put(payload, len(episode), seconds)
        finally:
            with self._lock:
                outbox.users -= 1

    def _borrow_outbox(self, slot: int) -> "_RobotOutbox":
        idle: list[_RobotOutbox] = []
        with self._lock:
            if slot not in self._outboxes:
                if len(self._outboxes) >= self.limits.max_outboxes:
                    idle = self._remove_idle()
                incarnation = self._committer.writer.producers[slot].incarnation + 1
                self._outboxes[slot] = _RobotOutbox(self._committer, slot, incarnation)
            outbox = self._outboxes[slot]
            outbox.users += 1
        for removed in idle:
            removed.close(0.0)
        return outbox

    def _remove_idle(self) -> "list[_RobotOutbox]":
        """Remove and return the outboxes whose episodes are all stored; the lock must be held."""
        idle = {slot: outbox for slot, outbox in self._outboxes.items() if outbox.idle}
        if not idle:
            raise StoreBusyError(
                f"episodes of {len(self._outboxes)} robots wait for the disk, as many as may; "
                f"{RETRY}"
            )
        for slot in idle:
            del self._outboxes[slot]
        snapshots = [outbox.recorder.snapshot() for outbox in idle.values()]
        self._closed_outboxes = merge([self._closed_outboxes, *snapshots])
        return list(idle.values())

    def _count_loss(self, name: str | None, reason: str) -> None:
        """An empty reason means that the episode was stored."""
        if reason:
            log.error("event=episode-lost name=%s reason=%r", name, reason)
            with self._lock:
                self._lost += 1


class _RobotOutbox:
    """Sends one robot's episodes, in order."""

    def __init__(self, committer: GroupCommitter, slot: int, incarnation: int) -> None:
        self.recorder = Recorder()
        self.users = 0  # threads that are about to put
        self._order = threading.Lock()
        self._answers: dict[int, Future[str]] = {}  # by sequence number
        self._sequence = 0
        self._outbox = Outbox(
            committer,
            slot,
            incarnation,
            recorder=self.recorder,
            on_ack=lambda acked: self._resolve(acked.key, ""),
            on_reject=lambda key, ack: self._resolve(key, ack.reason or "refused"),
        )

    @property
    def unacked(self) -> int:
        return self._outbox.unacked

    @property
    def idle(self) -> bool:
        return not self.users and not self.unacked

    def put(self, payload: bytes, steps: int, seconds: float) -> "Future[str]":
        if not self._order.acquire(timeout=seconds):
            raise StoreBusyError(f"others wait for the disk; {RETRY}")
        try:
            answer: Future[str] = Future()
            self._answers[self._sequence] = answer
            if not self._outbox.put(payload, seconds, steps=steps):
                del self._answers[self._sequence]
                reason = self._outbox.failure or "too many episodes wait for the disk"
                raise StoreBusyError(f"{reason}; {RETRY}")
            self._sequence += 1
        finally:
            self._order.release()
        return answer

    def close(self, seconds: float) -> int:
        """Wait up to `seconds`, close, and return the number of episodes that are not stored."""
        unacked = self._outbox.flush(seconds)
        self._outbox.close()
        return unacked

    def _resolve(self, key: AppendKey, reason: str) -> None:
        answer = self._answers.pop(AppendKey(*key).sequence, None)
        if answer is not None:
            answer.set_result(reason)


def slot_of(name: str | None) -> int:
    """The slot is a hash of the name, so that it is the same in every run."""
    return ANONYMOUS if name is None else zlib.crc32(name.encode()) & 0x7FFFFFFF
