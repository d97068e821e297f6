"""How planners compare on pretrained runs: tuned on some seeds, reported on others.

python -m benchmarks.offline tune RUN [RUN ...] --out results.jsonl     every setting, tuning seeds
python -m benchmarks.offline play RUN [RUN ...] --out results.jsonl     the best one, fresh seeds
python -m benchmarks.offline sweep RUN [RUN ...] --out results.jsonl    temperatures, for the figure
python -m benchmarks.offline show results.jsonl [--png figure.png]      prints the tables

Started again, a command plays only what is not in the file yet; runs are known by their path.

A run is a folder NAME-SEED made by `m3pc pretrain`; runs of one NAME differ in their training seed.
Every method chooses among equally many settings by equally many tuning episodes: acting without
planning among ratios (times the best return of the data: what the policy is asked for), a planner
among ratios and spreads of its candidates. The choice is one for all runs of a NAME.
"""

import argparse
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks import played
from benchmarks.played import Doubles, Found, finish, gain_cells, name_of

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
    spread: float | None  # None: does not plan
    seed: int
    episodes: int
    temperature: float | None = None  # None: the configuration's

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


Result = played.Result[Job]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, do in (("tune", tune), ("play", play), ("sweep", sweep)):
        playing = commands.add_parser(name)
        playing.add_argument("runs", nargs="+")
        playing.add_argument("--out", type=Path, required=True)
        playing.add_argument("--jobs", type=int, default=2)
        playing.set_defaults(do=lambda given, do=do: do(given.runs, given.out, given.jobs))
    showing = commands.add_parser("show")
    showing.add_argument("results", type=Path)
    showing.add_argument("--png", type=Path)
    showing.set_defaults(do=lambda given: show(read(given.results), given.png))
    given = parser.parse_args()
    given.do(given)


def tune(runs: list[str], out: Path, workers: int) -> None:
    """All settings of all methods."""
    finish(
        [_tuning(r, m, x) for r in runs for m in METHODS for x in settings(m)],
        out,
        workers,
        _played,
    )


def play(runs: list[str], out: Path, workers: int) -> None:
    """The best setting of each method, on fresh seeds."""
    tuned = choices(read(out))
    tuning = [_tuning(r, m, tuned[name_of(r), m]) for r in runs for m in METHODS]
    finish(
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
    finish(jobs, out, workers, _played)


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


def _played(job: Job) -> Found:
    from m3pc.evaluation.evaluate import EvaluationRequest, matches

    sets = []
    if job.spread is not None:
        sets.append(f"{job.guide}.spread={job.spread}")
    if job.temperature is not None:
        sets.append(f"{job.guide}.inverse_temperature={job.temperature}")
    order = EvaluationRequest(
        path=Path(job.run),
        env_id=None,
        episodes=job.episodes,
        seed=job.seed,
        ratio=job.ratio,
        sets=tuple(sets),
    )
    (match,) = matches(order, [job.method])
    return match.play(lambda numbers: None).as_json()


def read(path: Path) -> list[Result]:
    return played.read(path, Job)


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
    fresh = [one for one in results if one.job.seed == FRESH_SEED]
    print(
        f"{FRESH_EPISODES} fresh episodes a run (seed {FRESH_SEED}); {len(RATIOS)} settings for "
        f"every method, each tuned with {TUNING_EPISODES} episodes a run (seed {TUNING_SEED}); "
        f"engine {fresh[0].found['engine']}\n"
    )
    for name in dict.fromkeys(one.job.name for one in fresh):
        _show_name(name, [one for one in fresh if one.job.name == name])
    if png is not None:
        _draw(results, png)


def _show_name(name: str, fresh: list[Result]) -> None:
    runs = sorted({one.job.run for one in fresh})
    found = {(one.job.run, one.job.method): one for one in fresh}
    table = {m: np.stack([found[run, m].returns for run in runs]) for m in METHODS}
    print(f"### {name}: {len(runs)} training seeds\n")
    print(
        "| method | ratio | spread | return | score | by training seed | effective candidates"
        " | minus RCBC, 95 % interval | by training seed |"
    )
    print("|---" * 9 + "|")
    for method, returns in table.items():
        cells = _method_cells([found[run, method] for run in runs], returns)
        if method != "rcbc":
            cells += gain_cells(returns - table["rcbc"])
        print(f"| {' | '.join(cells)} |")
    print()


def _method_cells(results: list[Result], returns: Doubles) -> list[str]:
    job = results[0].job
    effective = [x for one in results for x in one.found["effective"] if x is not None]
    scores = [one.found["score"] for one in results if one.found["score"] is not None]
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
    from m3pc.plots import returns_by_candidates

    curves: dict[str, dict[float, list[Result]]] = {}
    for one in results:
        if one.job.temperature is not None:
            curve = curves.setdefault(f"{one.job.name}, {one.job.method}", {})
            curve.setdefault(one.job.temperature, []).append(one)
    points = {
        label: [_point(group) for group in by_temperature.values()]
        for label, by_temperature in curves.items()
    }
    returns_by_candidates(png, points, title="Return against effective candidates, by temperature")


def _point(group: list[Result]) -> tuple[float, float, float]:
    """Effective candidates, return and its standard error, of one temperature over all runs."""
    returns = np.concatenate([one.returns for one in group])
    effective = [x for one in group for x in one.found["effective"]]
    error = returns.std(ddof=1) / returns.size**0.5
    return float(np.mean(effective)), float(returns.mean()), float(error)


if __name__ == "__main__":
    main()
