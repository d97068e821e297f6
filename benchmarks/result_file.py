"""Evaluations kept in a file, one per line: a benchmark that was killed continues from there.

The jobs of a benchmark are frozen dataclasses of plain values.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

J = TypeVar("J")
Doubles = NDArray[np.float64]
EvaluationRow = dict[str, Any]  # what `m3pc evaluate --json` writes for a planner


@dataclass(frozen=True, slots=True)
class Result(Generic[J]):
    job: J
    evaluation: EvaluationRow

    @property
    def returns(self) -> Doubles:
        return np.asarray(self.evaluation["returns"])


def play_missing(
    jobs: Sequence[J], out: Path, workers: int, play: Callable[[J], EvaluationRow]
) -> None:
    """Play the jobs that are not in the file yet, and append their results."""
    played = {result.job for job in jobs[:1] for result in read_results(out, type(job))}
    left = [job for job in jobs if job not in played]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(play, job): job for job in left}
        for number, future in enumerate(as_completed(futures), start=1):
            job, row = futures[future], future.result()
            with out.open("a", encoding="utf-8") as file:
                line = {"job": asdict(job), "found": row}  # type: ignore[call-overload]
                file.write("\n" + json.dumps(line))
            print(f"{number}/{len(left)} {job}: {row['mean']:.0f}", flush=True)


def read_results(path: Path, kind: type[J]) -> list[Result[J]]:
    if not path.exists():
        return []
    # A line that a kill left incomplete does not end so.
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}}")]
    return [Result(kind(**row["job"]), row["found"]) for row in rows]


def name_of(run: str) -> str:
    """NAME of a run's folder NAME-SEED."""
    return Path(run).name.rpartition("-")[0]


def gain_cells(gains: Doubles) -> list[str]:
    """Mean of paired differences [runs, episodes] with its interval, and the mean of each run."""
    from m3pc.evaluation.statistics import bootstrap_interval

    low, high = bootstrap_interval(gains)
    by_seed = ", ".join(f"{x:+.0f}" for x in gains.mean(axis=1))
    return [f"{gains.mean():+.0f} ({low:+.0f} to {high:+.0f})", by_seed]
