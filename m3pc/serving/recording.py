"""Episodes of robots in a store, each once, under a slot of the robot's own.

A robot is an actor like any other: what it did can be sampled, dropped by slot, exported.
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
from m3pc.telemetry.recorder import Recorder, Snapshot, merged
from m3pc.types import AppendKey, Episode, InputError
from replay.format.manifest import Header
from replay.format.payload import encode
from replay.format.validation import check
from replay.writing.group_commit import GroupCommitter
from replay.writing.writer import Writer, WriterOptions

ACK_SECONDS: Final = 5.0  # that an answer waits for the disk
PUT_SECONDS: Final = 1.0
FLUSH_SECONDS: Final = 20.0  # at the end, for all together
ANONYMOUS: Final = 0  # slot of those without a name
MOST_ROBOTS: Final = 256  # names whose episodes are on their way, for each of which a thread sends

log = logging.getLogger(__name__)

LATER: Final = "end the session again, later"

StoreOutcome = Literal["durable", "waiting", "rejected"]


class StoreBusyError(RuntimeError):
    """So much waits for the disk that no more is taken now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    outcome: StoreOutcome
    slot: int
    reason: str = ""


class EpisodeRecording:
    """Any thread may store. Holds the store until it is closed."""

    def __init__(self, path: Path, weights: Weights) -> None:
        self._header = Header(
            states=weights.state_size,
            actions=weights.action_size,
            max_episode_steps=weights.max_episode_steps,
            env=weights.env,
            source={"kind": "robots"},
        )
        self._recorder = Recorder()
        self._appender = GroupCommitter(
            Writer(path, self._header, WriterOptions(durability="fsync")), recorder=self._recorder
        )
        self._lock = threading.Lock()  # of what follows; nobody waits for a disk while he has it
        self._lines: dict[int, _Line] = {}
        self._gone: Snapshot = {}  # what lines told that are there no more
        self._lost = 0

    def store(self, name: str | None, episode: Episode) -> Stored:
        """Wait for the disk, but not for long: what waits then is stored as soon as it can be.

        StoreBusyError where it may be tried again, OSError where nothing is stored any more.
        """
        slot = slot_of(name)
        try:
            check(episode, self._header, number=0)
        except InputError as error:
            return Stored(outcome="rejected", slot=slot, reason=str(error))
        told = self._put(slot, episode, PUT_SECONDS)
        try:
            reason = told.result(ACK_SECONDS)
        except TimeoutError:
            self._appender.writer.require_whole()
            reason = "the disk has not answered yet; the server's log says why"
            return Stored(outcome="waiting", slot=slot, reason=reason)
        return Stored(outcome="rejected" if reason else "durable", slot=slot, reason=reason)

    def keep(self, name: str | None, episode: Episode, seconds: float = PUT_SECONDS) -> None:
        """The same where nobody waits for an answer: what cannot be stored is counted."""
        try:
            check(episode, self._header, number=0)
            told = self._put(slot_of(name), episode, seconds)
        except (InputError, StoreBusyError, OSError) as error:
            self._lose(name, str(error))
        else:
            told.add_done_callback(lambda done: self._lose(name, done.result()))

    def snapshot(self) -> Snapshot:
        with self._lock:
            gone, lines = self._gone, list(self._lines.values())
        recorders = [self._recorder, *(line.recorder for line in lines)]
        return merged([gone, *(each.snapshot() for each in recorders)])

    @property
    def broken(self) -> bool:
        """Nothing is stored any more, until the server is started anew."""
        try:
            self._appender.writer.require_whole()
        except OSError:
            return True
        return False

    def close(self) -> int:
        """How many episodes could not be stored."""
        with self._lock:
            lines = list(self._lines.values())
        with ThreadPoolExecutor(max(len(lines), 1)) as pool:
            seconds = 0.0 if self.broken else FLUSH_SECONDS
            left = [pool.submit(line.close, seconds) for line in lines]
            waiting = sum(each.result() for each in left)
        self._appender.close()
        return waiting + self._lost

    def _put(self, slot: int, episode: Episode, seconds: float) -> "Future[str]":
        """Why it is not stored, once that is known; empty where it is."""
        self._appender.writer.require_whole()
        payload = encode(episode)
        line = self._borrowed(slot)
        try:
            return line.put(payload, len(episode), seconds)
        finally:
            with self._lock:
                line.users -= 1

    def _borrowed(self, slot: int) -> "_Line":
        idle: list[_Line] = []
        with self._lock:
            if slot not in self._lines:
                if len(self._lines) >= MOST_ROBOTS:
                    idle = self._released()
                incarnation = self._appender.writer.producer(slot).incarnation + 1
                self._lines[slot] = _Line(self._appender, slot, incarnation)
            line = self._lines[slot]
            line.users += 1
        for each in idle:
            each.close(0.0)
        return line

    def _released(self) -> "list[_Line]":
        """Lines of which everything is stored make room."""
        idle = {slot: line for slot, line in self._lines.items() if line.idle}
        if not idle:
            raise StoreBusyError(
                f"episodes of {len(self._lines)} robots wait for the disk, as many as may; {LATER}"
            )
        for slot in idle:
            del self._lines[slot]
        self._gone = merged([self._gone, *(line.recorder.snapshot() for line in idle.values())])
        return list(idle.values())

    def _lose(self, name: str | None, reason: str) -> None:
        """An episode of which nobody else will hear; none where there is no reason."""
        if reason:
            log.error("event=episode-lost name=%s reason=%r", name, reason)
            with self._lock:
                self._lost += 1


class _Line:
    """What one robot sends, in order."""

    def __init__(self, appender: GroupCommitter, slot: int, incarnation: int) -> None:
        self.recorder, self.users = Recorder(), 0  # those that are about to put
        self._own = threading.Lock()  # of the order
        self._told: dict[int, Future[str]] = {}  # by sequence
        self._count = 0
        self._outbox = Outbox(
            appender,
            slot,
            incarnation,
            recorder=self.recorder,
            on_ack=lambda receipt: self._tell(receipt.key, ""),
            on_reject=lambda key, ack: self._tell(key, ack.reason or "refused"),
        )

    @property
    def idle(self) -> bool:
        return not self.users and not self._outbox.unacked

    def put(self, payload: bytes, steps: int, seconds: float) -> "Future[str]":
        if not self._own.acquire(timeout=seconds):
            raise StoreBusyError(f"others wait for the disk; {LATER}")
        try:
            told: Future[str] = Future()
            self._told[self._count] = told
            if not self._outbox.put(payload, seconds, steps=steps):
                del self._told[self._count]
                why = self._outbox.failure or "too many episodes wait for the disk"
                raise StoreBusyError(f"{why}; {LATER}")
            self._count += 1
        finally:
            self._own.release()
        return told

    def close(self, seconds: float) -> int:
        lost = self._outbox.flush(seconds)
        self._outbox.close()
        return lost

    def _tell(self, key: AppendKey, reason: str) -> None:
        told = self._told.pop(AppendKey(*key).sequence, None)
        if told is not None:
            told.set_result(reason)


def slot_of(name: str | None) -> int:
    """The same on every day: nothing has to be remembered for it."""
    return ANONYMOUS if name is None else zlib.crc32(name.encode()) & 0x7FFFFFFF
