"""How often planners succeed at robosuite's tasks, over models that differ in their training seed.

python -m benchmarks.manipulation play RUN [RUN ...] --out results.jsonl [--ratio 1] [--set ...]
python -m benchmarks.manipulation show results.jsonl [--png figure.png]

A run is a folder NAME-SEED made by `m3pc pretrain`; runs of one NAME are one row. Trials of a run
begin in the same states for every planner, so differences are paired. Started again, `play` plays
only what is not in the file yet; runs are known by their path.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import played
from benchmarks.played import Doubles, Found, finish, name_of
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
    settings: str  # PATH=VALUE with spaces between
    seed: int
    episodes: int

    @property
    def name(self) -> str:
        return name_of(self.run)


Result = played.Result[Job]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    playing = commands.add_parser("play")
    playing.add_argument("runs", nargs="+")
    playing.add_argument("--out", type=Path, required=True)
    playing.add_argument("--planner", nargs="+", choices=METHODS, default=METHODS)
    playing.add_argument("--ratio", type=float, default=1.0, help="of the best return of the data")
    playing.add_argument("--set", nargs="+", default=[], metavar="PATH=VALUE", dest="sets")
    playing.add_argument("--trials", type=int, default=TRIALS)
    playing.add_argument("--tune", action="store_true", help="on seeds that are not reported")
    playing.add_argument("--jobs", type=int, default=1)
    playing.set_defaults(do=play)
    showing = commands.add_parser("show")
    showing.add_argument("results", type=Path)
    showing.add_argument("--tuning", action="store_true", help="what --tune played instead")
    showing.add_argument("--png", type=Path)
    showing.set_defaults(do=lambda given: show(read(given.results), given.tuning, given.png))
    given = parser.parse_args()
    given.do(given)


def play(given: argparse.Namespace) -> None:
    jobs = [
        Job(
            run=run,
            method=method,
            ratio=given.ratio,
            settings=" ".join(given.sets) if method != "rcbc" else "",
            seed=TUNING_SEED if given.tune else FRESH_SEED,
            episodes=given.trials,
        )
        for run in given.runs
        for method in given.planner
    ]
    finish(jobs, given.out, given.jobs, _played)


def _played(job: Job) -> Found:
    from m3pc.evaluation.evaluate import EvaluationRequest, matches

    order = EvaluationRequest(
        path=Path(job.run),
        env_id=None,
        episodes=job.episodes,
        seed=job.seed,
        ratio=job.ratio,
        sets=tuple(job.settings.split()),
    )
    (match,) = matches(order, [job.method])
    return match.play(lambda numbers: None).as_json()


def read(path: Path) -> list[Result]:
    return played.read(path, Job)


def successes(result: Result) -> Doubles:
    """0 or 1 for each trial."""
    return np.asarray(result.found["successes"], np.float64)


def show(results: list[Result], tuning: bool, png: Path | None) -> None:
    chosen = [one for one in results if (one.job.seed == TUNING_SEED) == tuning]
    if not chosen:
        raise SystemExit("no trials of that kind in the file; play some")
    seed, engine = chosen[0].job.seed, chosen[0].found["engine"]
    print(f"{chosen[0].job.episodes} trials of seed {seed} a run; engine {engine}\n")
    groups: dict[tuple[str, str, float, str], list[Result]] = {}
    for one in chosen:
        key = (one.job.name, one.job.method, one.job.ratio, one.job.settings)
        groups.setdefault(key, []).append(one)
    rows = []
    for (name, method, ratio, settings), group in groups.items():
        beside = groups.get((name, "rcbc", ratio, ""), [])
        planned = ["", ""] if method == "rcbc" else [_gain(group, beside), _effective(group)]
        rows.append([name, method, f"{ratio:g}", settings, *_cells(group), *planned])
    table(HEAD, rows)
    if png is not None:
        _draw(groups, png)


def _cells(group: list[Result]) -> list[str]:
    from m3pc.evaluation.statistics import interval

    each = np.stack([successes(one) for one in group])
    low, high = interval(each)
    lengths = np.concatenate([np.asarray(one.found["lengths"]) for one in group])
    won = lengths[each.ravel() > 0]
    return [
        f"{each.mean():.2f} ({low:.2f} to {high:.2f})",
        ", ".join(f"{share:.2f}" for share in each.mean(axis=1)),
        f"{np.median(won):.0f}" if len(won) else "",
    ]


def _gain(group: list[Result], beside: list[Result]) -> str:
    from m3pc.evaluation.statistics import interval

    plain = {one.job.run: successes(one) for one in beside}
    if any(one.job.run not in plain for one in group):
        return ""
    gains = np.stack([successes(one) - plain[one.job.run] for one in group])
    low, high = interval(gains)
    return f"{gains.mean():+.2f} ({low:+.2f} to {high:+.2f})"


def _effective(group: list[Result]) -> str:
    """Mean over decisions and trials, by training seed."""
    return ", ".join(f"{np.mean(one.found['effective']):.1f}" for one in group)


def _draw(groups: dict[tuple[str, str, float, str], list[Result]], png: Path) -> None:
    from m3pc.plots import success_rates

    bars: dict[str, dict[str, list[float]]] = {}
    for (name, method, ratio, settings), group in groups.items():
        asked = "" if ratio == 1 else f"@{ratio:g}"
        shares = [float(successes(one).mean()) for one in group]
        bars.setdefault(name, {})[f"{method}{asked} {settings}".strip()] = shares
    success_rates(png, bars, title="Share of trials that succeeded; dots are training seeds")


if __name__ == "__main__":
    main()
