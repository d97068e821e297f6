"""When a run is measured: the newest weights at fixed numbers of environment steps, and at its end.

Nothing here waits; the evaluator plays in a process of its own.
"""

import logging
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from m3pc.distributed.supervisor import SupervisedProcess, reason_of
from m3pc.model import checkpoint
from m3pc.model.weights import to_bytes
from m3pc.online.evaluation import Evaluated, is_due
from m3pc.online.recovery import WEIGHTS
from m3pc.online.run_folder import OnlineRun
from m3pc.tracking.run_log import RunLog, read
from m3pc.types import Coordinator, CoordinatorUnavailableError
from planner.server.weights_loader import RejectedError
from planner.server.weights_loader import read as published

HUNG = 600.0  # seconds in which an evaluation took no step
ASK_SECONDS = 120.0  # in which an evaluation that is due cannot begin
TRIES = 3  # of one evaluation whose process dies or hangs

log = logging.getLogger(__name__)


class EvaluationScheduler:
    def __init__(self, run: OnlineRun, seat: SupervisedProcess, coordinator: Coordinator) -> None:
        """`seat` is the evaluator's."""
        self._run, self._seat, self._coordinator = run, seat, coordinator
        self._every = run.config.evaluation.every
        self._pending: tuple[int, Any] | None = None  # steps, answer
        self._waiting: float | None = None  # since when one is due
        self._lost = 0  # tries of the evaluation that is due
        self.rows = read(run.path, "evaluation")
        self._asked = self._evaluated  # steps at the last evaluation that was asked for

    def poll(self, now: float, steps: int, runlog: RunLog, *, last: bool = False) -> None:
        """Take what has come; ask if it is time, or if this is the `last` of the run."""
        if self._pending is not None:
            self._take(now, runlog)
        elif not is_due(self._asked, steps, every=self._every, last=last):
            self._waiting = None
        elif not self._ask(steps) and self._waiting is None:
            self._waiting = now

    def is_done(self, now: float, steps: int) -> bool:
        """Whether nothing more can come after so many steps."""
        if self._pending is not None:
            return False
        given_up = self._waiting is not None and now - self._waiting > ASK_SECONDS
        return self._asked >= steps or given_up or self._seat.state == "parked"

    def _ask(self, steps: int) -> bool:
        """Whether it could be. First what the run was before anything was learnt, however much is
        collected already."""
        if self._seat.state != "up":
            return False
        at, content = (steps, self._newest()) if self._asked >= 0 else (0, self._offline())
        if content is None:
            return False
        self._asked, self._waiting = at, None
        self._pending = at, self._seat.handle.evaluate.remote(content)
        return True

    def _take(self, now: float, runlog: RunLog) -> None:
        assert self._pending is not None
        steps, answer = self._pending
        if not ray.wait([answer], timeout=0)[0]:
            idle: float | None = self._seat.report
            if idle is not None and idle > HUNG:
                self._seat.lost(now, f"an evaluation took no step for {idle:.0f} s")
            return
        self._pending = None
        try:
            found: Evaluated = ray.get(answer, timeout=1.0)
        except RayError as error:
            self._lose(steps, error)
            return
        self._lost = 0
        self.rows.append({"step": steps, **found.numbers})
        runlog.write("evaluation", steps, found.numbers, returns=found.returns)

    def _lose(self, steps: int, error: RayError) -> None:
        """Where its process died it is asked again at the next turn, but not for ever. What failed
        by itself would fail again: the next one may not."""
        self._lost += 1
        again = self._lost < TRIES and not isinstance(error, RayTaskError)
        log.warning(
            "event=evaluation-lost steps=%d again=%s reason=%s", steps, again, reason_of(error)
        )
        if again:
            self._asked = self._evaluated
        else:
            self._lost = 0

    @property
    def _evaluated(self) -> int:
        return max((row["step"] for row in self.rows), default=-1)

    def _offline(self) -> bytes:
        return to_bytes(checkpoint.read(self._run.offline).weights)

    def _newest(self) -> bytes | None:
        """What was published last, verified; or nothing now: it may just be replaced."""
        try:
            pointer = self._coordinator.read(WEIGHTS)
            return to_bytes(published(self._run.path, pointer)) if pointer else None
        except (CoordinatorUnavailableError, RejectedError) as error:
            log.info("event=nothing-to-evaluate reason=%s", error)
            return None
