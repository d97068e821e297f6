"""Stores for tests: one in memory, one in a folder, and some that misbehave."""

import random
import threading
from collections.abc import Callable
from pathlib import Path

from m3pc.types import Ack, AckStatus, AppendKey, EpisodeSink


def ack(status: AckStatus, expected: int = 0) -> Ack:
    return Ack(status=status, expected=expected, durability="os", reason="as asked")


class InMemorySink:
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


class LossySink:
    """Fails before a call reaches the store, or loses the reply after it, by chance."""

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
        ack_of_sink = self._sink.append(key, payload)
        if luck < 0.6:
            self.lost_replies += 1
            raise TimeoutError("no reply")
        return ack_of_sink


class ScriptedSink:
    """Answers by a function of the key and of the number of times it was sent."""

    def __init__(self, answer: Callable[[AppendKey, int], Ack]) -> None:
        self._answer = answer
        self.sent: list[int] = []

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        self.sent.append(key.sequence)
        return self._answer(key, self.sent.count(key.sequence))


class BlockedSink:
    """Blocks every call until it is opened; then it passes calls on."""

    def __init__(self, sink: EpisodeSink) -> None:
        self._sink = sink
        self.open, self.called = threading.Event(), threading.Event()

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        self.called.set()
        assert self.open.wait(30)
        return self._sink.append(key, payload)


class FolderSink:
    """A file an episode: a store that several processes see and that can be sent to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        path = self._folder / "-".join(map(str, key))
        if path.exists():
            return ack(AckStatus.DUPLICATE, key.sequence + 1)
        partial = path.with_name(f".{path.name}")  # complete or absent, if the writer is killed
        partial.write_bytes(payload)
        partial.rename(path)
        return ack(AckStatus.DURABLE, key.sequence + 1)

    def payloads(self) -> dict[AppendKey, bytes]:
        paths = self._folder.glob("[0-9]*")
        keys = {AppendKey(*map(int, path.name.split("-"))): path for path in paths}
        return {key: keys[key].read_bytes() for key in sorted(keys)}
