"""Batches drawn ahead by a thread, while a learner works on the one before."""

import logging
import time
from collections.abc import Callable
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Generic, Protocol, Self, TypeVar

B = TypeVar("B")
log = logging.getLogger(__name__)


class Draws(Protocol[B]):
    """A mixture, or whatever draws batches as one does."""

    def batch(self, update: int, out: B | None = None) -> B: ...

    def later(self) -> "Draws[B]": ...


class Prefetch(Generic[B]):
    """The batches of updates `first`, `first` + 1, ..., up to `ahead` of them drawn before they are
    asked for. A batch is valid until the next one is asked for: its arrays are used again.

    Stores are looked at anew before each update that is a multiple of `refresh`, so what is drawn
    does not depend on how fast anybody is, as long as the stores do not.
    """

    def __init__(
        self,
        draws: Draws[B],
        *,
        first: int,
        ahead: int = 2,
        refresh: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._draws, self._first, self._refresh, self._clock = draws, first, refresh, clock
        self._free: SimpleQueue[B | None] = SimpleQueue()  # arrays to draw into; None: make some
        for _ in range(ahead):
            self._free.put(None)
        self._ready: SimpleQueue[B | Exception] = SimpleQueue()
        self._lent: B | None = None  # the batch that is valid
        self._asked = False  # whether the one after it was asked for
        self._failure: Exception | None = None
        self._closing = Event()
        self._thread = Thread(target=self._run, name="prefetch", daemon=True)
        self.taken = 0  # batches
        self.waited = 0.0  # seconds that `take` waited for them

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, timeout: float = 60.0) -> B:
        """The next batch; or the exception that drawing it met, now and at every later call."""
        if self._failure is not None:
            raise self._failure
        if not self._asked:
            self._free.put(self._lent)
            self._asked = True
        found = self._wait(timeout)
        if isinstance(found, Exception):
            self._failure = found
            raise found
        self._lent, self._asked = found, False
        self.taken += 1
        return found

    def close(self, timeout: float = 10.0) -> None:
        """End the thread, after the batch that it may be drawing."""
        self._failure = RuntimeError("this prefetch is closed: no batch comes any more; open a new")
        self._closing.set()
        self._free.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("event=prefetch-stuck waited_s=%s", timeout)

    def _wait(self, timeout: float) -> B | Exception:
        start = self._clock()
        try:
            return self._ready.get(timeout=timeout)
        except Empty:
            raise TimeoutError(
                f"no batch came in {timeout} s; look whether the store's disk hangs, or wait longer"
            ) from None
        finally:
            self.waited += self._clock() - start

    def _run(self) -> None:
        try:
            for update in count(self._first):
                out = self._free.get()
                if self._closing.is_set():
                    return
                if update % self._refresh == 0:
                    self._draws = self._draws.later()
                self._ready.put(self._draws.batch(update, out))
        except Exception as error:  # whatever it is, whoever waits for the batch must hear of it
            self._ready.put(error)
