"""A rollout process under Ray. Logic belongs in rollout_worker.py.

Ray restarts a process that died. The new one is idle until the driver sends the configuration
again. Nothing heavy is imported before the constructor has set the number of threads.
"""

import logging
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Final

import ray

from actors.reports import RolloutStatus
from m3pc.core.exit_codes import OK, TERMINATED
from m3pc.telemetry.process_report import ProcessReport

if TYPE_CHECKING:
    from actors.rollout_worker import RolloutConfig, RolloutWorker

DRAIN_SECONDS: Final = 5.0  # after SIGTERM
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

log = logging.getLogger(__name__)


# max_concurrency > 1: the actor answers while it drains. Ray's types lack this argument.
@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=0, max_concurrency=4)  # type: ignore[call-overload]
class RolloutActor:
    """The Ray actor of one slot. It forwards its methods to a `RolloutWorker`."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._worker: RolloutWorker | None = None
        os.environ.update(ONE_THREAD)
        logging.basicConfig(level=logging.INFO)
        # Only the main thread may set a handler; Ray runs constructors there.
        signal.signal(signal.SIGTERM, self._terminated)

    def start(self, config: "RolloutConfig") -> None:
        from actors.rollout_worker import RolloutWorker

        if self._worker is None:
            self._worker = RolloutWorker(self._slot)
        self._worker.start(config)

    def report(self, after: int = -1) -> ProcessReport[RolloutStatus]:
        if self._worker is None:
            status = RolloutStatus(state="idle", slot=self._slot)
            return ProcessReport(pid=os.getpid(), snapshot={}, detail=status)
        return self._worker.report(after)

    def drain(self, seconds: float) -> int:
        return self._worker.drain(seconds) if self._worker else 0

    def stop(self) -> None:
        if self._worker:
            self._worker.stop()

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Drain in a thread: the main thread serves Ray. A second signal ends the process."""
        signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
        threading.Thread(target=self._leave, name="leave").start()

    def _leave(self) -> None:
        unacked = self.drain(DRAIN_SECONDS)
        log.info("event=terminated slot=%d unacked=%d", self._slot, unacked)
        os._exit(TERMINATED if unacked else OK)
