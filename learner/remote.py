"""Ray actors around learners. Logic belongs in the LearnerProcess, not here."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import ray

from m3pc.telemetry.process_report import ProcessReport

log = logging.getLogger(__name__)


class LearnerProcess(Protocol):
    def work(self, stop: threading.Event) -> None:
        """Learn until `stop` is set."""

    def report(self, error: str = "") -> ProcessReport[Any]:
        """Progress so far; `error` is why the work ended, or empty."""


# The driver restarts the actor, under a new epoch. Ray's types lack max_concurrency.
@ray.remote(num_cpus=1, max_restarts=0, max_concurrency=4)  # type: ignore[call-overload]
class LearnerActor:
    """Learns in a thread and answers calls meanwhile. An error ends only the work: see `report`."""

    def __init__(self, build: Callable[[], LearnerProcess]) -> None:
        self.learner = build()
        self._stop, self._error = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.learner.work(self._stop)
        except BaseException as error:
            log.exception("event=learner-failed")
            self._error = f"{type(error).__name__}: {error}"

    def report(self) -> ProcessReport[Any]:
        return self.learner.report(self._error)

    def stop(self, seconds: float) -> bool:
        """Save and end; True if the work ended within `seconds` and without an error."""
        self._stop.set()
        self._thread.join(seconds)
        return not self._thread.is_alive() and not self._error

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)  # type: ignore[call-overload]
class FollowerActor:
    """Runs a follower. The actor has no name and ends with the lead learner's process."""

    def work(self, work: Callable[[], None]) -> None:
        work()

    def pid(self) -> int:
        return os.getpid()
