"""Evaluates a run's newest weights at fixed numbers of environment steps and at its end.

No call here blocks: the evaluator reads the weights and plays in its own process.
"""

import logging
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from m3pc.distributed.evaluator import EvaluatorStatus
from m3pc.distributed.supervised_process import SupervisedProcess, reason_of
from m3pc.online.evaluation import EvaluationRecord, is_due
from m3pc.online.recovery import WEIGHTS
from m3pc.online.run_folder import OnlineRun
from m3pc.tracking.run_log import RunLog, read_metrics
from m3pc.types import Coordinator, CoordinatorUnavailableError, Pointer
from planner.server.weights_loader import RejectedError

STEP_SECONDS = 600.0  # an evaluation without a step for so long counts as hung
START_SECONDS = 120.0  # at the run's end, wait at most so long for a due evaluation to start
TRIES = 3  # attempts at one evaluation if its process dies or hangs

log = logging.getLogger(__name__)


class EvaluationScheduler:
    """Requests the evaluations of a run and writes their results into its log."""

    def __init__(
        self,
        run: OnlineRun,
        evaluator: SupervisedProcess[EvaluatorStatus],
        coordinator: Coordinator,
    ) -> None:
        self._run, self._evaluator, self._coordinator = run, evaluator, coordinator
        self._every = run.config.evaluation.every
        self._pending: tuple[int, Any] | None = None  # steps, reply
        self._delayed_since: float | None = None  # when a due evaluation first could not start
        self._failures = 0  # failed tries of the due evaluation
        self.rows = read_metrics(run.path, "evaluation")
        self._requested = self._evaluated  # steps at the last requested evaluation

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def poll(self, now: float, steps: int, runlog: RunLog, *, last: bool = False) -> None:
        """Receive a finished evaluation, or request one that is due; `last`: the run is at its
        end."""
        if self._pending is not None:
            self._receive(now, runlog)
        elif not is_due(self._requested, steps, every=self._every, last=last):
            self._delayed_since = None
        elif not self._request(steps):
            self._delay(now)

    def is_done(self, now: float, steps: int) -> bool:
        """Whether no further evaluation can follow after so many steps."""
        if self._pending is not None:
            return False
        delayed = self._delayed_since
        given_up = delayed is not None and now - delayed > START_SECONDS
        return self._requested >= steps or given_up or self._evaluator.state == "parked"

    def _delay(self, now: float) -> None:
        if self._delayed_since is None:
            self._delayed_since = now

    def _request(self, steps: int) -> bool:
        """Request an evaluation; return False if it cannot start. A run's first one always counts
        as step 0 and uses the offline weights."""
        if self._evaluator.state != "up":
            return False
        pointer = None
        if self._requested < 0:
            steps = 0
        elif (pointer := self._newest()) is None:
            return False
        self._requested = steps
        self._pending = steps, self._evaluator.handle.evaluate.remote(pointer)
        return True

    def _newest(self) -> Pointer | None:
        try:
            return self._coordinator.read(WEIGHTS)
        except CoordinatorUnavailableError as error:
            log.info("event=nothing-to-evaluate reason=%s", error)
            return None

    def _receive(self, now: float, runlog: RunLog) -> None:
        assert self._pending is not None
        steps, reply = self._pending
        if not ray.wait([reply], timeout=0)[0]:
            report = self._evaluator.report
            if report is not None and report.detail.idle_seconds > STEP_SECONDS:
                idle = report.detail.idle_seconds
                self._evaluator.lost(now, f"an evaluation took no step for {idle:.0f} s")
            return
        self._pending = None
        try:
            record: EvaluationRecord = ray.get(reply, timeout=1.0)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            if isinstance(cause, RejectedError):  # file just replaced? Try again
                log.info("event=nothing-to-evaluate reason=%s: %s", cause.reason, cause.message)
                self._requested = self._evaluated
                self._delay(now)
            else:
                self._failed(steps, error)
            return
        self._failures, self._delayed_since = 0, None
        self.rows.append({"step": steps, **record.numbers})
        runlog.write("evaluation", steps, record.numbers, returns=record.returns)

    def _failed(self, steps: int, error: RayError) -> None:
        """Repeat an evaluation whose process died, up to TRIES times. An evaluation that raised
        an error would raise it again, so it is skipped."""
        self._failures, self._delayed_since = self._failures + 1, None
        repeat = self._failures < TRIES and not isinstance(error, RayTaskError)
        log.warning(
            "event=evaluation-lost steps=%d again=%s reason=%s", steps, repeat, reason_of(error)
        )
        if repeat:
            self._requested = self._evaluated
        else:
            self._failures = 0

    @property
    def _evaluated(self) -> int:
        return max((row["step"] for row in self.rows), default=-1)
