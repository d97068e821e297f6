"""The evaluator of a run: a process that plays fixed episodes with published weights."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from m3pc.model import checkpoint
from m3pc.model.device import prepare_compute
from m3pc.online.evaluation import EvaluationRecord, evaluate_run, evaluation_record
from m3pc.online.run_folder import open_run
from m3pc.telemetry.process_report import ProcessReport
from m3pc.types import Pointer, Version
from planner.server.weights_loader import read_published


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorStatus:
    idle_seconds: float  # since the current evaluation's last step; 0 between evaluations


# Ray's types lack max_concurrency. Two calls may run at once: it reports while it plays.
@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)  # type: ignore[call-overload]
class EvaluatorActor:
    """Evaluates one version at a time."""

    def __init__(self, run: Path) -> None:
        self._run = open_run(run)
        prepare_compute(self._run.config.compute)
        self._last_step: float | None = None

    def evaluate(self, pointer: Pointer | None) -> EvaluationRecord:
        """Evaluate published weights, or the run's offline checkpoint (None). Raises RejectedError
        if the file does not match the pointer."""
        self._step({})
        try:
            if pointer is None:
                weights = checkpoint.read(self._run.offline).weights
            else:
                weights = read_published(self._run.path, pointer)
            result = evaluate_run(self._run, weights, self._step)
        finally:
            self._last_step = None
        return evaluation_record(result, Version.unpacked(weights.version).number)

    def report(self) -> ProcessReport[EvaluatorStatus]:
        last = self._last_step
        status = EvaluatorStatus(idle_seconds=0.0 if last is None else time.monotonic() - last)
        return ProcessReport(pid=os.getpid(), snapshot={}, detail=status)

    def _step(self, numbers: Mapping[str, Any]) -> None:
        self._last_step = time.monotonic()
