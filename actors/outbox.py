"""Episodes on their way to the store: each arrives once, in order, however often it is sent.

The store takes the key (slot, incarnation, sequence) once, so sending again is safe. Some that it
acknowledged are kept as well, for a store that comes back knowing less than it promised.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from m3pc.telemetry.catalogue import ACTOR_BLOCKED, UNACKED
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Ack, AckStatus, AppendKey, EpisodeSink

MOST_BYTES: Final = 16 << 20
PAUSES: Final = (0.05, 5.0)  # seconds before a second trial: at first, at most
FLUSH_PAUSE: Final = 0.25  # at most, while somebody waits for the end
JOIN_SECONDS: Final = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnAck:
    """The store has this episode."""

    key: AppendKey
    ack: Ack
    steps: int
    sha256: str  # of the payload


@dataclass(slots=True)
class _OutboxEntry:
    sequence: int
    payload: bytes
    steps: int
    told: bool = False  # that it was acknowledged


class Outbox:
    """A thread that sends. `put` waits while too much is unacknowledged: that is back-pressure."""

    def __init__(
        self,
        sink: EpisodeSink,
        slot: int,
        incarnation: int,
        *,
        recorder: Recorder,
        most: int = 32,
        most_bytes: int = MOST_BYTES,
        on_ack: Callable[[OnAck], None] = lambda receipt: None,
        on_reject: Callable[[AppendKey, Ack], None] = lambda key, ack: None,
        rng: np.random.Generator | None = None,
        clock: Callable[[], float] = time.monotonic,
        pauses: tuple[float, float] = PAUSES,
    ) -> None:
        self._sink, self._slot, self._incarnation = sink, slot, incarnation
        self._recorder, self._clock = recorder, clock
        self._on_ack, self._on_reject = on_ack, on_reject
        self._most, self._most_bytes = most, most_bytes
        self._pauses, self._rng = pauses, rng or np.random.default_rng()
        self._held: deque[_OutboxEntry] = deque()  # the first `_acked` of them are acknowledged
        self._acked = self._sequence = self._failures = 0
        self._change = threading.Condition()
        self._closed = self._hurry = False
        self.fenced = False  # another has the slot: nothing more is taken
        self.failure = ""  # why nothing more can be sent; empty while it can
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._closed or self.fenced or bool(self.failure)

    @property
    def unacked(self) -> int:
        with self._change:
            return self._waiting

    def put(self, payload: bytes, timeout: float, *, steps: int = 0) -> bool:
        """False if there was no room in time, or nothing more can be sent."""
        begin = self._clock()
        with self._change:
            had_room = self._room(len(payload))
            self._change.wait_for(lambda: self.ended or self._room(len(payload)), timeout)
            if not had_room:
                self._recorder.add(ACTOR_BLOCKED, self._clock() - begin, label="replay")
            if self.ended or not self._room(len(payload)):
                return False
            self._held.append(_OutboxEntry(self._sequence, payload, steps))
            self._sequence += 1
            self._changed()
        return True

    def flush(self, seconds: float) -> int:
        """Wait until all is acknowledged, but not longer; how many are not."""
        with self._change:
            self._hurry = True
            self._change.notify_all()
            self._change.wait_for(lambda: self.ended or not self._waiting, seconds)
            return self._waiting

    def close(self) -> None:
        """What is not acknowledged is given up. A call to the store that hangs is left alone."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(JOIN_SECONDS)

    @property
    def _waiting(self) -> int:
        return len(self._held) - self._acked

    def _room(self, size: int) -> bool:
        """A payload above all limits goes alone, or it would wait for ever."""
        waiting = sum(len(letter.payload) for letter in self._unsent())
        return not self._waiting or (
            self._waiting < self._most and waiting + size <= self._most_bytes
        )

    def _unsent(self) -> list[_OutboxEntry]:
        return [self._held[k] for k in range(self._acked, len(self._held))]

    def _work(self) -> None:
        try:
            while (letter := self._next()) is not None:
                self._send(letter)
        except Exception as error:
            log.exception("event=outbox-failed")
            self._end(failure=f"{type(error).__name__}: {error}")

    def _send(self, letter: _OutboxEntry) -> None:
        key = AppendKey(self._slot, self._incarnation, letter.sequence)
        try:
            ack = self._sink.append(key, letter.payload)
        except Exception as error:  # dead, gone, late: whatever it is may pass
            self._pause(f"{type(error).__name__}: {str(error)[:200]}")
        else:
            self._answered(letter, key, ack)

    def _next(self) -> _OutboxEntry | None:
        with self._change:
            self._change.wait_for(lambda: self.ended or self._waiting > 0)
            return None if self.ended else self._held[self._acked]

    def _answered(self, letter: _OutboxEntry, key: AppendKey, ack: Ack) -> None:
        if ack.status in (AckStatus.DURABLE, AckStatus.DUPLICATE):
            self._tell(letter, key, ack)
            self._advance()
        elif ack.status is AckStatus.REJECTED:
            log.error("event=episode-rejected key=%s reason=%s", tuple(key), ack.reason)
            self._on_reject(key, ack)
            self._advance()
        elif ack.status is AckStatus.GAP:
            self._go_back(key, ack)
        elif ack.status is AckStatus.FENCED:
            log.warning("event=outbox-fenced key=%s reason=%s", tuple(key), ack.reason)
            self._end(fenced=True)
        else:
            self._pause(ack.reason)

    def _tell(self, letter: _OutboxEntry, key: AppendKey, ack: Ack) -> None:
        if not letter.told:
            letter.told = True
            digest = hashlib.sha256(letter.payload).hexdigest()
            self._on_ack(OnAck(key=key, ack=ack, steps=letter.steps, sha256=digest))

    def _advance(self) -> None:
        with self._change:
            self._acked, self._failures = self._acked + 1, 0
            kept = sum(len(self._held[k].payload) for k in range(self._acked))
            while self._acked > self._most or (self._acked and kept > self._most_bytes):
                kept -= len(self._held.popleft().payload)
                self._acked -= 1
            self._changed()

    def _go_back(self, key: AppendKey, ack: Ack) -> None:
        """The store lost what it had acknowledged."""
        first = self._held[0].sequence
        log.error(
            "event=store-gap key=%s expected=%d held_from=%d", tuple(key), ack.expected, first
        )
        if first <= ack.expected < key.sequence:
            with self._change:
                self._acked = ack.expected - first
                self._changed()
        else:
            self._end(
                failure=f"the store expects episode {ack.expected} of slot {key.slot}, incarnation "
                f"{key.incarnation}; it acknowledged all up to {key.sequence}, of which those "
                f"from {first} on are still held; restart the actor and verify the store"
            )

    def _end(self, *, fenced: bool = False, failure: str = "") -> None:
        with self._change:
            self.fenced, self.failure = fenced, failure
            self._changed()

    def _pause(self, why: str) -> None:
        """Full jitter, twice as long each time."""
        with self._change:
            first, most = self._pauses
            longest = min(first * 2.0 ** min(self._failures, 30), most)
            self._failures += 1
            if self._failures == 1 or longest == most:
                log.warning("event=append-failed trials=%d reason=%s", self._failures, why)
            if self._hurry:
                longest = min(longest, FLUSH_PAUSE)
            hurried = self._hurry
            seconds = float(self._rng.uniform(0, longest))
            self._change.wait_for(lambda: self.ended or self._hurry != hurried, seconds)

    def _changed(self) -> None:
        self._recorder.set(UNACKED, self._waiting)
        self._change.notify_all()
