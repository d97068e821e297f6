"""How often planners succeed at robosuite's tasks, over models that differ in their training seed.

python -m benchmarks.manipulation play RUN [RUN ...] --out results.jsonl [--ratio 1] [--set ...]
python -m benchmarks.manipulation show results.jsonl [--png figure.png]

A run is a folder NAME-SEED made by `m3pc pretrain`; runs with the same NAME share a row. All
planners of a run start their trials in the same states, so differences are paired. `play` skips the
trials that are already in the file; runs are identified by their path.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import result_file
from benchmarks.result_file import Doubles, EvaluationRow, name_of, play_missing
from benchmarks.tables import table

METHODS = ("rcbc", "m", "q")
TUNING_SEED, FRESH_SEED = 1000, 2000
TRIALS = 50
HEAD = ("set", "planner", "ratio", "settings", "succeeded, 95 % interval", "by training seed",
        "steps to success", "minus RCBC, 95 % interval", "effective candidates")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    run: str
    method: str
    ratio: float
    settings: str  # PATH=VALUE, separated by spaces
    seed: int
    episodes: int

    @property
    def name(self) -> str:
        return name_of(self.run)


Result = result_file.Result[Job]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    playing = commands.add_parser("play")
    playing.add_argument("runs", nargs="+")
    playing.add_argument("--out", type=Path, required=True)
    playing.add_argument("--planner", nargs="+", choices=METHODS, default=METHODS)
    playing.add_argument(
        "--ratio",
        type=float,
        default=1.0,
        help="target return, as a multiple of the best return in the data",
    )
    playing.add_argument("--set", nargs="+", default=[], metavar="PATH=VALUE", dest="sets")
    playing.add_argument("--trials", type=int, default=TRIALS)
    playing.add_argument("--tune", action="store_true", help="use seeds that are not reported")
    playing.add_argument("--jobs", type=int, default=1)
    playing.set_defaults(do=play)
    showing = commands.add_parser("show")
    showing.add_argument("results", type=Path)
    showing.add_argument("--tuning", action="store_true", help="show the trials of --tune instead")
    showing.add_argument("--png", type=Path)
    showing.set_defaults(
        do=lambda options: show(read(options.results), options.tuning, options.png)
    )
    options = parser.parse_args()
    options.do(options)


def play(options: argparse.Namespace) -> None:
    jobs = [
        Job(
            run=run,
            method=method,
            ratio=options.ratio,
            settings=" ".join(options.sets) if method != "rcbc" else "",
            seed=TUNING_SEED if options.tune else FRESH_SEED,
            episodes=options.trials,
        )
        for run in options.runs
        for method in options.planner
    ]
    play_missing(jobs, options.out, options.jobs, _played)


def _played(job: Job) -> EvaluationRow:
    from m3pc.core.progress import ignore_progress
    from m3pc.evaluation.jobs import EvaluationRequest, make_jobs

    request = EvaluationRequest(
        path=Path(job.run),
        env_id=None,
        episodes=job.episodes,
        seed=job.seed,
        ratio=job.ratio,
        sets=tuple(job.settings.split()),
    )
    (evaluation,) = make_jobs(request, [job.method])
    return evaluation.play(ignore_progress).as_json()


def read(path: Path) -> list[Result]:
    return result_file.read_results(path, Job)


def successes(result: Result) -> Doubles:
    """0 or 1 for each trial."""
    return np.asarray(result.evaluation["successes"], np.float64)


def show(results: list[Result], tuning: bool, png: Path | None) -> None:
    chosen = [result for result in results if (result.job.seed == TUNING_SEED) == tuning]
    if not chosen:
        raise SystemExit("no trials of that kind in the file; play some")
    seed, engine = chosen[0].job.seed, chosen[0].evaluation["engine"]
    print(f"{chosen[0].job.episodes} trials of seed {seed} a run; engine {engine}\n")
    groups: dict[tuple[str, str, float, str], list[Result]] = {}
    for result in chosen:
        key = (result.job.name, result.job.method, result.job.ratio, result.job.settings)
        groups.setdefault(key, []).append(result)
    rows = []
    for (name, method, ratio, settings), group in groups.items():
        baseline = groups.get((name, "rcbc", ratio, ""), [])
        planned = ["", ""] if method == "rcbc" else [_gain(group, baseline), _effective(group)]
        rows.append([name, method, f"{ratio:g}", settings, *_cells(group), *planned])
    table(HEAD, rows)
    if png is not None:
        _draw(groups, png)


def _cells(group: list[Result]) -> list[str]:
    from m3pc.evaluation.statistics import bootstrap_interval

    trials = np.stack([successes(result) for result in group])  # [runs, trials]
    low, high = bootstrap_interval(trials)
    lengths = np.concatenate([np.asarray(result.evaluation["lengths"]) for result in group])
    won = lengths[trials.ravel() > 0]
    return [
        f"{trials.mean():.2f} ({low:.2f} to {high:.2f})",
        ", ".join(f"{share:.2f}" for share in trials.mean(axis=1)),
        f"{np.median(won):.0f}" if len(won) else "",
    ]


def _gain(group: list[Result], baseline: list[Result]) -> str:
    """Mean difference to the same trials of the baseline, if all were played."""
    from m3pc.evaluation.statistics import bootstrap_interval

    by_run = {result.job.run: successes(result) for result in baseline}
    if any(result.job.run not in by_run for result in group):
        return ""
    gains = np.stack([successes(result) - by_run[result.job.run] for result in group])
    low, high = bootstrap_interval(gains)
    return f"{gains.mean():+.2f} ({low:+.2f} to {high:+.2f})"


def _effective(group: list[Result]) -> str:
    """Effective candidates: mean over decisions and trials, by training seed."""
    return ", ".join(f"{np.mean(result.evaluation['effective']):.1f}" for result in group)


def _draw(groups: dict[tuple[str, str, float, str], list[Result]], png: Path) -> None:
    from benchmarks.plots import success_rates

    bars: dict[str, dict[str, list[float]]] = {}
    for (name, method, ratio, settings), group in groups.items():
        suffix = "" if ratio == 1 else f"@{ratio:g}"
        shares = [float(successes(result).mean()) for result in group]
        bars.setdefault(name, {})[f"{method}{suffix} {settings}".strip()] = shares
    success_rates(png, bars, title="Share of trials that succeeded; dots are training seeds")


if __name__ == "__main__":
    main()
