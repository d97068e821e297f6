"""How planners compare on pretrained runs: tuned on some seeds, reported on others.

python -m benchmarks.offline play RUN [RUN ...] --out results.jsonl     plays what is not played yet
python -m benchmarks.offline show results.jsonl [--png figure.png]      prints the tables

A run is a folder NAME-SEED made by `m3pc pretrain`; runs of one NAME differ in their training seed.
Every method may choose one of the same RATIOS, by the same number of tuning episodes: the return
that the policy is asked for. The choice is one for all runs of a NAME.
"""

import argparse
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

METHODS = ("rcbc", "m", "q", "q0")
RATIOS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15)
TUNING_SEED, TUNING_EPISODES = 1000, 6
FRESH_SEED, FRESH_EPISODES = 2000, 20
TEMPERATURES = (0.0, 0.3, 1.0, 3.0, 10.0, 100.0)  # of the figure, at the tuned ratio
DRAWS = 10_000  # of the bootstrap

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    run: str
    method: str
    ratio: float
    seed: int
    episodes: int
    temperature: float | None = None  # None: the configuration's


Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    playing = commands.add_parser("play")
    playing.add_argument("runs", nargs="+")
    playing.add_argument("--out", type=Path, required=True)
    playing.add_argument("--jobs", type=int, default=2)
    playing.set_defaults(do=lambda given: play(given.runs, given.out, given.jobs))
    showing = commands.add_parser("show")
    showing.add_argument("results", type=Path)
    showing.add_argument("--png", type=Path)
    showing.set_defaults(do=lambda given: show(read(given.results), given.png))
    given = parser.parse_args()
    given.do(given)


def play(runs: list[str], out: Path, jobs: int) -> None:
    """Tune, then report, then the figure's sweep; each job once, however often this is started."""
    tuning = [Job(run=r, method=m, ratio=x, seed=TUNING_SEED, episodes=TUNING_EPISODES)
              for r in runs for m in METHODS for x in RATIOS]  # fmt: skip
    _finish(tuning, out, jobs)
    tuned = choices(read(out))
    fresh = [Job(run=r, method=m, ratio=tuned[_name(r), m], seed=FRESH_SEED,
                 episodes=FRESH_EPISODES)
             for r in runs for m in METHODS]  # fmt: skip
    _finish(fresh, out, jobs)
    sweep = [Job(run=r, method=m, ratio=tuned[_name(r), m], seed=TUNING_SEED,
                 episodes=TUNING_EPISODES, temperature=x)
             for r in runs for m in ("m", "q") for x in TEMPERATURES]  # fmt: skip
    _finish(sweep, out, jobs)


def _finish(jobs: Iterable[Job], out: Path, workers: int) -> None:
    played = {json.dumps(one["job"], sort_keys=True) for one in read(out)}
    left = [job for job in jobs if json.dumps(asdict(job), sort_keys=True) not in played]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_played, job): job for job in left}
        for number, future in enumerate(as_completed(futures), start=1):
            job, found = futures[future], future.result()
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"job": asdict(job), **found}) + "\n")
            print(f"{number}/{len(left)} {job.run} {job.method} {job.ratio}: {found['mean']:.0f}")


def _played(job: Job) -> Result:
    from m3pc.run.evaluate import Order, match

    sets = []
    if job.temperature is not None:
        sets = [f"planner.{job.method}.inverse_temperature={job.temperature}"]
    order = Order(
        path=Path(job.run),
        env_id=None,
        episodes=job.episodes,
        seed=job.seed,
        ratio=job.ratio,
        sets=tuple(sets),
    )
    return match(order, job.method).play(lambda numbers: None).as_json()


def read(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def choices(results: list[Result]) -> dict[tuple[str, str], float]:
    """The ratio with the best mean tuning return over all runs of a name, for each method."""
    table: dict[tuple[str, str], dict[float, list[float]]] = {}
    for one in results:
        job = one["job"]
        if job["seed"] == TUNING_SEED and job["temperature"] is None:
            key = (_name(job["run"]), job["method"])
            table.setdefault(key, {}).setdefault(job["ratio"], []).extend(one["returns"])
    return {
        key: max(ratios, key=lambda x: (np.mean(ratios[x]), -x)) for key, ratios in table.items()
    }


def _name(run: str) -> str:
    return Path(run).name.rpartition("-")[0]


def show(results: list[Result], png: Path | None) -> None:
    fresh = [one for one in results if one["job"]["seed"] == FRESH_SEED]
    print(f"{FRESH_EPISODES} fresh episodes a run (seed {FRESH_SEED}); ratios tuned with "
          f"{TUNING_EPISODES} episodes a run and ratio (seed {TUNING_SEED}), {len(RATIOS)} ratios "
          f"for every method; engine {fresh[0]['engine']}\n")  # fmt: skip
    for name in dict.fromkeys(_name(one["job"]["run"]) for one in fresh):
        _show_name(name, [one for one in fresh if _name(one["job"]["run"]) == name])
    if png is not None:
        _draw(results, png)


def _show_name(name: str, fresh: list[Result]) -> None:
    runs = sorted({one["job"]["run"] for one in fresh})
    returns_of = {(one["job"]["run"], one["job"]["method"]): one["returns"] for one in fresh}
    table = {m: np.array([returns_of[run, m] for run in runs]) for m in METHODS}
    print(f"### {name}: {len(runs)} training seeds\n")
    print("| method | ratio | return | score | by training seed | effective candidates"
          " | minus RCBC, 95 % interval | by training seed |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for method, returns in table.items():
        mine = [one for one in fresh if one["job"]["method"] == method]
        effective = [x for one in mine for x in one["effective"] if x is not None]
        scores = [one["score"] for one in mine if one["score"] is not None]
        difference = ""
        by_seed = ""
        if method != "rcbc":
            gains = returns - table["rcbc"]
            low, high = interval(gains)
            difference = f"{gains.mean():+.0f} ({low:+.0f} to {high:+.0f})"
            by_seed = ", ".join(f"{x:+.0f}" for x in gains.mean(axis=1))
        print(
            f"| {method} | {mine[0]['job']['ratio']} | {returns.mean():.0f}"
            f" ± {returns.std(ddof=1) / returns.size**0.5:.0f}"
            f" | {np.mean(scores):.1f} | {', '.join(f'{x:.0f}' for x in returns.mean(axis=1))}"
            f" | {f'{np.mean(effective):.0f}' if effective else ''} | {difference} | {by_seed} |"
        )
    print()


def interval(gains: Doubles) -> tuple[float, float]:
    """95 % of the mean of paired differences [runs, episodes], by a bootstrap that draws training
    seeds first and then episodes: both are samples."""
    rng = np.random.default_rng(0)
    runs, episodes = gains.shape
    run = rng.integers(runs, size=(DRAWS, runs, 1))
    episode = rng.integers(episodes, size=(DRAWS, runs, episodes))
    low, high = np.percentile(gains[run, episode].mean(axis=(1, 2)), [2.5, 97.5])
    return float(low), float(high)


def _draw(results: list[Result], png: Path) -> None:
    from m3pc.pictures import returns_by_candidates

    sweeps: dict[str, list[tuple[float, float, float]]] = {}
    for one in results:
        job = one["job"]
        if job["temperature"] is None:
            continue
        returns = np.asarray(one["returns"])
        sweeps.setdefault(f"{_name(job['run'])}, {job['method']}", []).append(
            (float(np.mean(one["effective"])), returns.mean(), returns.std() / len(returns) ** 0.5)
        )
    returns_by_candidates(png, sweeps, title="return against effective candidates")


if __name__ == "__main__":
    main()
