"""Evaluations beside the collecting: a process of its own, fixed versions, fixed seeds."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from m3pc.model.device import prepare_compute
from m3pc.model.weights import from_bytes
from m3pc.online.evaluation import Evaluated, evaluated, evaluation
from m3pc.online.run_folder import open_run
from m3pc.types import Version


# Ray's types do not know max_concurrency; more than 1 so that it answers while it plays.
@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)  # type: ignore[call-overload]
class EvaluatorActor:
    def __init__(self, run: Path) -> None:
        self._run = open_run(run)
        prepare_compute(self._run.config.compute)
        self._beat: float | None = None  # of the last step that was played

    def evaluate(self, content: bytes) -> Evaluated:
        weights = from_bytes(content)
        self._step({})
        try:
            found = evaluation(self._run, weights, self._step)
        finally:
            self._beat = None
        return evaluated(found, Version.unpacked(weights.version).number)

    def report(self) -> float:
        """Seconds since it last stepped, of an evaluation that is being played; else 0."""
        beat = self._beat
        return 0.0 if beat is None else time.monotonic() - beat

    def _step(self, numbers: Mapping[str, Any]) -> None:
        self._beat = time.monotonic()
