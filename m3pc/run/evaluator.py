"""Evaluations beside the collecting: a process of its own, fixed versions, fixed seeds."""

from pathlib import Path

import ray

from m3pc.compute import prepare_compute
from m3pc.run.evaluation import Evaluated, evaluated, evaluation
from m3pc.run.online import open_run
from m3pc.types import Version
from m3pc.weights import from_bytes


# Ray's types do not know max_concurrency.
@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)  # type: ignore[call-overload]
class EvaluatorActor:
    def __init__(self, run: Path) -> None:
        self._run = open_run(run)
        prepare_compute(self._run.config.compute)

    def evaluate(self, content: bytes) -> Evaluated:
        weights = from_bytes(content)
        updates = Version.unpacked(weights.version).number
        return evaluated(evaluation(self._run, weights), updates)

    def report(self) -> bool:
        return True
