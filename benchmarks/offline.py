"""How planners compare on pretrained runs: tuned on some seeds, reported on others.

python -m benchmarks.offline tune RUN [RUN ...] --out results.jsonl     every setting, tuning seeds
python -m benchmarks.offline play RUN [RUN ...] --out results.jsonl     the best result, fresh seeds
python -m benchmarks.offline sweep RUN [RUN ...] --out results.jsonl    temperatures, for the figure
python -m benchmarks.offline show results.jsonl [--png figure.png]      prints the tables

Started again, a command plays only what is not in the file yet; a run is identified by its path.

A run is a folder NAME-SEED made by `m3pc pretrain`; runs of one NAME differ in their training seed.
Every method has equally many settings and tuning episodes to choose one: acting without planning
among ratios (the target return, as a multiple of the best return of the data), a planner among
ratios and noise scales (`spread`) of its candidates. All runs of a NAME share the choice.
"""

import argparse
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks import result_file
from benchmarks.result_file import Doubles, EvaluationRow, gain_cells, name_of, play_missing

METHODS = ("rcbc", "m", "q", "q0")
RATIOS = (0.4, 0.6, 0.8, 1.0, 1.15, 1.3)  # without planning
PLANS = tuple(product((0.8, 1.0, 1.15), (0.3, 0.6)))  # ratio, spread
TUNING_SEED, TUNING_EPISODES = 1000, 4
FRESH_SEED, FRESH_EPISODES = 2000, 20
TEMPERATURES = (0.0, 0.3, 1.0, 3.0, 10.0, 100.0)  # of the figure, at the tuned ratio

Setting = tuple[float, float | None]  # ratio, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    run: str
    method: str
    ratio: float
    spread: float | None  # of m or q; None: no planning
    seed: int
    episodes: int
    temperature: float | None = None  # None: as configured

    @property
    def name(self) -> str:
        return name_of(self.run)

    @property
    def setting(self) -> Setting:
        return self.ratio, self.spread

    @property
    def guide(self) -> str:
        """The section of the planner's configuration that this method reads."""
        return "planner.m" if self.method == "m" else "planner.q"


Result = result_file.Result[Job]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, do in (("tune", tune), ("play", play), ("sweep", sweep)):
        playing = commands.add_parser(name)
        playing.add_argument("runs", nargs="+")
        playing.add_argument("--out", type=Path, required=True)
        playing.add_argument("--jobs", type=int, default=2)
        playing.set_defaults(do=lambda options, do=do: do(options.runs, options.out, options.jobs))
    showing = commands.add_parser("show")
    showing.add_argument("results", type=Path)
    showing.add_argument("--png", type=Path)
    showing.set_defaults(do=lambda options: show(read(options.results), options.png))
    options = parser.parse_args()
    options.do(options)


def tune(runs: list[str], out: Path, workers: int) -> None:
    """All settings of all methods."""
    play_missing(
        [_tuning(r, m, x) for r in runs for m in METHODS for x in settings(m)],
        out,
        workers,
        _played,
    )


def play(runs: list[str], out: Path, workers: int) -> None:
    """The best setting of each method, on fresh seeds."""
    tuned = choices(read(out))
    tuning = [_tuning(r, m, tuned[name_of(r), m]) for r in runs for m in METHODS]
    play_missing(
        [replace(j, seed=FRESH_SEED, episodes=FRESH_EPISODES) for j in tuning],
        out,
        workers,
        _played,
    )


def sweep(runs: list[str], out: Path, workers: int) -> None:
    """The tuned planners at other temperatures, on the tuning seeds."""
    tuned = choices(read(out))
    jobs = [
        replace(_tuning(r, m, tuned[name_of(r), m]), temperature=x)
        for r in runs
        for m in ("m", "q")
        for x in TEMPERATURES
    ]
    play_missing(jobs, out, workers, _played)


def settings(method: str) -> list[Setting]:
    return [(ratio, None) for ratio in RATIOS] if method == "rcbc" else list(PLANS)


def _tuning(run: str, method: str, setting: Setting) -> Job:
    ratio, spread = setting
    return Job(
        run=run,
        method=method,
        ratio=ratio,
        spread=spread,
        seed=TUNING_SEED,
        episodes=TUNING_EPISODES,
    )


def _played(job: Job) -> EvaluationRow:
    from m3pc.evaluation.jobs import EvaluationRequest, make_jobs

    sets = []
    if job.spread is not None:
        sets.append(f"{job.guide}.spread={job.spread}")
    if job.temperature is not None:
        sets.append(f"{job.guide}.inverse_temperature={job.temperature}")
    request = EvaluationRequest(
        path=Path(job.run),
        env_id=None,
        episodes=job.episodes,
        seed=job.seed,
        ratio=job.ratio,
        sets=tuple(sets),
    )
    (evaluation,) = make_jobs(request, [job.method])
    return evaluation.play(lambda numbers: None).as_json()


def read(path: Path) -> list[Result]:
    return result_file.read_results(path, Job)


def choices(results: list[Result]) -> dict[tuple[str, str], Setting]:
    """The setting with the best mean tuning return over all runs of a name, for each method."""
    table: dict[tuple[str, str], dict[Setting, list[float]]] = {}
    for result in results:
        job = result.job
        if job.seed == TUNING_SEED and job.temperature is None:
            returns = table.setdefault((job.name, job.method), {})
            returns.setdefault(job.setting, []).extend(result.returns)
    return {
        key: max(settings(key[1]), key=lambda x: float(np.mean(returns.get(x, -np.inf))))
        for key, returns in table.items()
    }


def show(results: list[Result], png: Path | None) -> None:
    fresh = [result for result in results if result.job.seed == FRESH_SEED]
    print(
        f"{FRESH_EPISODES} fresh episodes a run (seed {FRESH_SEED}); {len(RATIOS)} settings for "
        f"every method, each tuned with {TUNING_EPISODES} episodes a run (seed {TUNING_SEED}); "
        f"engine {fresh[0].evaluation['engine']}\n"
    )
    for name in dict.fromkeys(result.job.name for result in fresh):
        _show_name(name, [result for result in fresh if result.job.name == name])
    if png is not None:
        _draw(results, png)


def _show_name(name: str, fresh: list[Result]) -> None:
    runs = sorted({result.job.run for result in fresh})
    by_run = {(result.job.run, result.job.method): result for result in fresh}
    table = {m: np.stack([by_run[run, m].returns for run in runs]) for m in METHODS}
    print(f"### {name}: {len(runs)} training seeds\n")
    print(
        "| method | ratio | spread | return | score | by training seed | effective candidates"
        " | minus RCBC, 95 % interval | by training seed |"
    )
    print("|---" * 9 + "|")
    for method, returns in table.items():
        cells = _method_cells([by_run[run, method] for run in runs], returns)
        if method != "rcbc":
            cells += gain_cells(returns - table["rcbc"])
        print(f"| {' | '.join(cells)} |")
    print()


def _method_cells(results: list[Result], returns: Doubles) -> list[str]:
    job = results[0].job
    effective = [x for result in results for x in result.evaluation["effective"] if x is not None]
    scores = [
        result.evaluation["score"] for result in results if result.evaluation["score"] is not None
    ]
    return [
        job.method,
        f"{job.ratio:g}",
        "" if job.spread is None else f"{job.spread:g}",
        f"{returns.mean():.0f} ± {returns.std(ddof=1) / returns.size**0.5:.0f}",
        f"{np.mean(scores):.1f}" if scores else "",
        ", ".join(f"{x:.0f}" for x in returns.mean(axis=1)),
        f"{np.mean(effective):.0f}" if effective else "",
    ]


def _draw(results: list[Result], png: Path) -> None:
    from benchmarks.plots import returns_by_candidates

    curves: dict[str, dict[float, list[Result]]] = {}
    for result in results:
        if result.job.temperature is not None:
            curve = curves.setdefault(f"{result.job.name}, {result.job.method}", {})
            curve.setdefault(result.job.temperature, []).append(result)
    points = {
        label: [_point(group) for group in by_temperature.values()]
        for label, by_temperature in curves.items()
    }
    returns_by_candidates(png, points, title="Return against effective candidates, by temperature")


def _point(group: list[Result]) -> tuple[float, float, float]:
    """Effective candidates, return and its standard error, of one temperature over all runs."""
    returns = np.concatenate([result.returns for result in group])
    effective = [x for result in group for x in result.evaluation["effective"]]
    error = returns.std(ddof=1) / returns.size**0.5
    return float(np.mean(effective)), float(returns.mean()), float(error)


if __name__ == "__main__":
    main()
