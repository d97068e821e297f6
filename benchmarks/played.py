"""Evaluations kept in a file, a line each: a command that was killed goes on where it was.

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
Found = dict[str, Any]  # what `m3pc evaluate` writes of a planner


@dataclass(frozen=True, slots=True)
class Result(Generic[J]):
    job: J
    found: Found

    @property
    def returns(self) -> Doubles:
        return np.asarray(self.found["returns"])


def finish(jobs: Sequence[J], out: Path, workers: int, play: Callable[[J], Found]) -> None:
    """Play what is not in the file yet."""
    played = {result.job for job in jobs[:1] for result in read(out, type(job))}
    left = [job for job in jobs if job not in played]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(play, job): job for job in left}
        for number, future in enumerate(as_completed(futures), start=1):
            job, found = futures[future], future.result()
            with out.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"job": asdict(job), "found": found}))  # type: ignore[call-overload]
            print(f"{number}/{len(left)} {job}: {found['mean']:.0f}", flush=True)


def read(path: Path, kind: type[J]) -> list[Result[J]]:
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}}")]
    return [Result(kind(**row["job"]), row["found"]) for row in rows]  # not one that a kill cut off


def name_of(run: str) -> str:
    """Of a folder NAME-SEED."""
    return Path(run).name.rpartition("-")[0]


def gain_cells(gains: Doubles) -> list[str]:
    """The mean of paired differences [runs, episodes] with its interval, and by run."""
    from m3pc.evaluation.statistics import interval

    low, high = interval(gains)
    by_seed = ", ".join(f"{x:+.0f}" for x in gains.mean(axis=1))
    return [f"{gains.mean():+.0f} ({low:+.0f} to {high:+.0f})", by_seed]
