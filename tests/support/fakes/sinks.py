"""Stores that misbehave, around one that does not."""

import random
import threading
from collections.abc import Callable
from pathlib import Path

from m3pc.types import Ack, AckStatus, AppendKey, EpisodeSink


def ack(status: AckStatus, expected: int = 0) -> Ack:
    return Ack(status=status, expected=expected, durability="os", reason="as asked")


class Kept:
    """Takes everything, in memory, by the rules of a store."""

    def __init__(self) -> None:
        self.payloads: dict[AppendKey, bytes] = {}
        self.sent: list[AppendKey] = []

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        self.sent.append(key)
        before = [k.sequence for k in self.payloads if k[:2] == key[:2]]
        expected = max(before, default=-1) + 1
        if key.sequence < expected:
            return ack(AckStatus.DUPLICATE, expected)
        if key.sequence > expected:
            return ack(AckStatus.GAP, expected)
        self.payloads[key] = payload
        return ack(AckStatus.DURABLE, expected + 1)


class Lossy:
    """Dies before the call reaches the store, or loses the reply after it."""

    def __init__(self, sink: EpisodeSink, seed: int) -> None:
        self._sink, self._rng = sink, random.Random(seed)
        self.calls = self.lost_replies = 0

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        self.calls += 1
        luck = self._rng.random()
        if luck < 0.2:
            raise ConnectionError("nobody there")
        if luck < 0.3:
            return ack(AckStatus.RETRY_LATER)
        found = self._sink.append(key, payload)
        if luck < 0.6:
            self.lost_replies += 1
            raise TimeoutError("no reply")
        return found


class Scripted:
    """Answers by a function of the key and of how often it was sent."""

    def __init__(self, answer: Callable[[AppendKey, int], Ack]) -> None:
        self._answer = answer
        self.sent: list[int] = []

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        self.sent.append(key.sequence)
        return self._answer(key, self.sent.count(key.sequence))


class Shut:
    """Answers nobody until it is opened; then as the one behind it."""

    def __init__(self, sink: EpisodeSink) -> None:
        self._sink = sink
        self.open, self.called = threading.Event(), threading.Event()

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        self.called.set()
        assert self.open.wait(30)
        return self._sink.append(key, payload)


class InFolder:
    """A file an episode: a store that several processes see and that can be sent to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        path = self._folder / "-".join(map(str, key))
        if path.exists():
            return ack(AckStatus.DUPLICATE, key.sequence + 1)
        aside = path.with_name(f".{path.name}")  # whole or absent, whenever its writer is killed
        aside.write_bytes(payload)
        aside.rename(path)
        return ack(AckStatus.DURABLE, key.sequence + 1)

    def payloads(self) -> dict[AppendKey, bytes]:
        whole = self._folder.glob("[0-9]*")
        keys = {AppendKey(*map(int, path.name.split("-"))): path for path in whole}
        return {key: keys[key].read_bytes() for key in sorted(keys)}
