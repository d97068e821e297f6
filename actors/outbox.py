"""Sends episodes to the store: each is stored once, in order, however often it is sent.

The store accepts each key (slot, incarnation, sequence) once, so sending again is safe. The outbox
also keeps some acknowledged episodes, in case a store loses them in a restart.
"""

import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from m3pc.core.backoff import Backoff
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, UNACKED
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Ack, AckStatus, AppendKey, EpisodeSink

MAX_BYTES: Final = 16 << 20
BACKOFF: Final = Backoff(first=0.05, longest=5.0)  # pauses between attempts to send
MAX_FLUSH_PAUSE: Final = 0.25  # seconds, during `flush`
JOIN_SECONDS: Final = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AckedEpisode:
    """An episode that the store acknowledged."""

    key: AppendKey
    ack: Ack
    steps: int
    sha256: str  # hash of the payload


class AckLog:
    """An `on_ack` that writes one JSON line per episode, to compare with the store later.

    Each line reaches the operating system before the next episode is sent.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)

    def __call__(self, acked: AckedEpisode) -> None:
        row = {**acked.key._asdict(), "steps": acked.steps, "sha256": acked.sha256}
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


@dataclass(slots=True)
class _OutboxEntry:
    sequence: int
    payload: bytes
    steps: int
    reported: bool = False  # whether `on_ack` was called


class Outbox:
    """Sends episodes in a thread. `put` waits while too much is unacknowledged (back-pressure)."""

    def __init__(
        self,
        sink: EpisodeSink,
        slot: int,
        incarnation: int,
        *,
        recorder: Recorder,
        max_episodes: int = 32,
        max_bytes: int = MAX_BYTES,
        on_ack: Callable[[AckedEpisode], None] | None = None,
        on_reject: Callable[[AppendKey, Ack], None] | None = None,
        rng: np.random.Generator | None = None,
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff = BACKOFF,
    ) -> None:
        """`max_episodes` and `max_bytes` limit unacknowledged episodes, and also kept ones."""
        self._sink, self._slot, self._incarnation = sink, slot, incarnation
        self._recorder, self._clock = recorder, clock
        self._on_ack, self._on_reject = on_ack, on_reject
        self._max_episodes, self._max_bytes = max_episodes, max_bytes
        self._backoff, self._rng = backoff, rng or np.random.default_rng()
        self._held: deque[_OutboxEntry] = deque()  # the first `_acked` of them are acknowledged
        self._acked = self._sequence = self._failures = 0
        self._change = threading.Condition()
        self._closed = self._flushing = False
        self.fenced = False  # the store takes no more episodes of this incarnation
        self.failure = ""  # why sending failed for good, or empty
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
        """Queue an episode. False if there was no room in time, or the outbox ended."""
        begin = self._clock()
        with self._change:
            had_room = self._has_room(len(payload))
            self._change.wait_for(lambda: self.ended or self._has_room(len(payload)), timeout)
            if not had_room:
                self._recorder.add(ACTOR_BLOCKED, self._clock() - begin, label="replay")
            if self.ended or not self._has_room(len(payload)):
                return False
            self._held.append(_OutboxEntry(self._sequence, payload, steps))
            self._sequence += 1
            self._changed()
        return True

    def flush(self, seconds: float) -> int:
        """Wait up to `seconds` for all acknowledgements. Returns how many are missing."""
        with self._change:
            self._flushing = True
            self._change.notify_all()
            self._change.wait_for(lambda: self.ended or not self._waiting, seconds)
            return self._waiting

    def close(self) -> None:
        """Give up unacknowledged episodes. Does not wait for a store call that hangs."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(JOIN_SECONDS)

    @property
    def _waiting(self) -> int:
        return len(self._held) - self._acked

    def _has_room(self, size: int) -> bool:
        """A payload above the limits is sent alone; otherwise it would wait indefinitely."""
        unsent = sum(len(self._held[k].payload) for k in range(self._acked, len(self._held)))
        return not self._waiting or (
            self._waiting < self._max_episodes and unsent + size <= self._max_bytes
        )

    def _work(self) -> None:
        try:
            while (entry := self._next()) is not None:
                self._send(entry)
        except Exception as error:
            log.exception("event=outbox-failed")
            self._end(failure=f"{type(error).__name__}: {error}")

    def _next(self) -> _OutboxEntry | None:
        with self._change:
            self._change.wait_for(lambda: self.ended or self._waiting > 0)
            return None if self.ended else self._held[self._acked]

    def _send(self, entry: _OutboxEntry) -> None:
        key = AppendKey(self._slot, self._incarnation, entry.sequence)
        try:
            ack = self._sink.append(key, entry.payload)
        except Exception as error:  # dead, gone or late: the next attempt may succeed
            self._pause(f"{type(error).__name__}: {str(error)[:200]}")
            return
        if ack.status in (AckStatus.DURABLE, AckStatus.DUPLICATE):
            if self._on_ack is not None and not entry.reported:
                entry.reported = True
                digest = hashlib.sha256(entry.payload).hexdigest()
                self._on_ack(AckedEpisode(key=key, ack=ack, steps=entry.steps, sha256=digest))
            self._advance()
        elif ack.status is AckStatus.REJECTED:
            log.error("event=episode-rejected key=%s reason=%s", tuple(key), ack.reason)
            if self._on_reject is not None:
                self._on_reject(key, ack)
            self._advance()
        elif ack.status is AckStatus.GAP:
            self._go_back(key, ack)
        elif ack.status is AckStatus.FENCED:
            log.warning("event=outbox-fenced key=%s reason=%s", tuple(key), ack.reason)
            self._end(fenced=True)
        else:
            self._pause(ack.reason)

    def _advance(self) -> None:
        with self._change:
            self._acked, self._failures = self._acked + 1, 0
            kept = sum(len(self._held[k].payload) for k in range(self._acked))
            while self._acked > self._max_episodes or (self._acked and kept > self._max_bytes):
                kept -= len(self._held.popleft().payload)
                self._acked -= 1
            self._changed()

    def _go_back(self, key: AppendKey, ack: Ack) -> None:
        """The store lost episodes that it had acknowledged: send them again, if still held."""
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

    def _pause(self, reason: str) -> None:
        """Wait for a random part of the back-off; a `flush` that begins meanwhile ends the wait."""
        with self._change:
            self._failures += 1
            longest = self._backoff.pause(self._failures) == self._backoff.longest
            if self._failures == 1 or longest:
                log.warning("event=append-failed trials=%d reason=%s", self._failures, reason)
            backoff, was_flushing = self._backoff, self._flushing
            if was_flushing:
                backoff = replace(backoff, longest=min(backoff.longest, MAX_FLUSH_PAUSE))
            seconds = backoff.jittered(self._failures, self._rng)
            self._change.wait_for(lambda: self.ended or self._flushing != was_flushing, seconds)

    def _changed(self) -> None:
        self._recorder.set(UNACKED, self._waiting)
        self._change.notify_all()
