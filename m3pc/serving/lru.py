"""What was said before, for whoever asks again: the newest so many."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from m3pc.serving.messages import End, EndResponse, SessionCreated, SessionStatus

MOST: Final = 1024  # sessions that are over, and keys

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSession:
    """A session that is over."""

    standing: SessionStatus
    why: str  # it is over
    said: End | None = None  # by its robot
    answer: EndResponse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    """An answer to whoever opened a session under a key."""

    digest: bytes  # of the question
    opened: SessionCreated


class LRU(Generic[V]):
    """By id. The oldest makes room."""

    def __init__(self, most: int = MOST) -> None:
        self._found: OrderedDict[str, V] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._found)

    def put(self, id: str, value: V) -> None:
        self._found[id] = value
        if len(self._found) > self._most:
            self._found.popitem(last=False)

    def get(self, id: str) -> V | None:
        return self._found.get(id)

    def forget(self, id: str) -> bool:
        """Whether it was known."""
        return self._found.pop(id, None) is not None
