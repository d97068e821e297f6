"""Learners in their own processes. Logic belongs in what `build` returns, and in `work`."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import ray

log = logging.getLogger(__name__)


class LearnerProcess(Protocol):
    def work(self, stop: threading.Event) -> None: ...

    def report(self, error: str = "") -> Any: ...


# The driver restarts it, under a new epoch. Ray's types do not know max_concurrency.
@ray.remote(num_cpus=1, max_restarts=0, max_concurrency=4)  # type: ignore[call-overload]
class LearnerActor:
    """Works in a thread, so that it can be asked meanwhile. Its process ends with an error only
    when it is killed: why the work ended is in its report."""

    def __init__(self, build: Callable[[], LearnerProcess]) -> None:
        self._work = build()
        self._stop, self._error = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work.work(self._stop)
        except BaseException as error:
            log.exception("event=learner-failed")
            self._error = f"{type(error).__name__}: {error}"

    def report(self) -> Any:
        return self._work.report(self._error)

    def stop(self, seconds: float) -> bool:
        """Save and end; whether it did, and in time."""
        self._stop.set()
        self._thread.join(seconds)
        return not self._thread.is_alive() and not self._error

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)  # type: ignore[call-overload]
class FollowerActor:
    """Works along with a learner. Made by it and not named, it ends when that learner's process
    does."""

    def work(self, work: Callable[[], None]) -> None:
        work()

    def pid(self) -> int:
        return os.getpid()
