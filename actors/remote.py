"""A rollout process under Ray. Logic belongs in collector.py.

Ray restarts the process by itself; it comes back idle, and whoever drives the run sends it the
order again. Nothing heavy is imported before the constructor has set the number of threads.
"""

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Final

import ray

from actors.reports import RolloutReport
from m3pc.core.exit_codes import OK, TERMINATED

if TYPE_CHECKING:
    from actors.rollout_worker import RolloutConfig, RolloutWorker

DRAIN_SECONDS: Final = 5.0  # after SIGTERM
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

log = logging.getLogger(__name__)


# Ray's types do not know max_concurrency; more than 1 so that it answers while it drains.
@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=0, max_concurrency=4)  # type: ignore[call-overload]
class RolloutActor:
    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._collector: RolloutWorker | None = None
        os.environ.update(ONE_THREAD)
        logging.basicConfig(level=logging.INFO)
        # Ray runs constructors in the main thread, where alone a handler may be set.
        signal.signal(signal.SIGTERM, self._terminated)

    def start(self, order: "RolloutConfig") -> None:
        from actors.rollout_worker import RolloutWorker

        if self._collector is None:
            self._collector = RolloutWorker(self._slot)
        self._collector.start(order)

    def report(self, after: int = -1) -> RolloutReport:
        if self._collector is None:
            return RolloutReport(state="idle", pid=os.getpid(), slot=self._slot)
        return self._collector.report(after)

    def drain(self, seconds: float) -> int:
        return self._collector.drain(seconds) if self._collector else 0

    def stop(self) -> None:
        if self._collector:
            self._collector.stop()

    def loaded(self, module: str) -> bool:
        return module in sys.modules

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """In a thread: the main one has to serve Ray, and a second signal ends it at once."""
        signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
        threading.Thread(target=self._leave, name="leave").start()

    def _leave(self) -> None:
        left = self.drain(DRAIN_SECONDS)
        log.info("event=terminated slot=%d unacked=%d", self._slot, left)
        os._exit(TERMINATED if left else OK)
