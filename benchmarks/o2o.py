"""What online finetuning gains: finished runs, before and after.

python -m benchmarks.o2o show RUN [RUN ...] [--png figure.png]          the runs' own evaluations
python -m benchmarks.o2o play RUN [RUN ...] --out results.jsonl         both, on fresh seeds
python -m benchmarks.o2o compare results.jsonl                          prints what was played

A run is a folder NAME-SEED made by `m3pc finetune`; runs of one NAME differ in their training seed.
Before and after are played on the same episodes, with the given planners (rcbc@0.4: a target of 0.4
times the best return) or with the one that the run was evaluated with. Started again, `play` plays
only what is not in the file yet; a run is identified by its path.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.result_file import (
    Doubles,
    EvaluationRow,
    Result,
    gain_cells,
    name_of,
    play_missing,
    read_results,
)

FRESH_SEED, FRESH_EPISODES = 3000, 20
LAST = 3  # evaluations whose mean is the level at the end
WEIGHTS = ("offline", "finetuned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    run: str
    weights: str  # one of WEIGHTS
    seed: int
    episodes: int
    planner: str = ""  # default: the one that the run was evaluated with


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """A run's own evaluations, from its metrics."""

    run: str
    unit: str  # of scores: that of D4RL's scale, or the return itself
    steps: list[int]  # of its evaluations
    scores: list[float]
    returns: Doubles  # [evaluations, episodes]
    updates: int  # at the last evaluation
    oldest: float  # updates that the learner was ahead of an episode's policy, at most
    bound: int  # beyond which an actor pauses instead of acting with a policy

    @property
    def gains(self) -> Doubles:
        """[episodes] the last evaluation minus the first, by episode."""
        gains: Doubles = self.returns[-1] - self.returns[0]
        return gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    showing = commands.add_parser("show")
    showing.add_argument("runs", nargs="+")
    showing.add_argument("--png", type=Path)
    showing.set_defaults(do=lambda options: show(options.runs, options.png))
    playing = commands.add_parser("play")
    playing.add_argument("runs", nargs="+")
    playing.add_argument("--out", type=Path, required=True)
    playing.add_argument("--jobs", type=int, default=2)
    playing.add_argument("--episodes", type=int, default=FRESH_EPISODES)
    playing.add_argument("--planner", action="append", default=[])
    playing.set_defaults(do=play_command)
    comparing = commands.add_parser("compare")
    comparing.add_argument("results", type=Path)
    comparing.set_defaults(do=lambda options: compare(read_results(options.results, Job)))
    options = parser.parse_args()
    options.do(options)


def _names(runs: Iterable[str]) -> dict[str, list[str]]:
    runs_by_name: dict[str, list[str]] = {}
    for run in runs:
        runs_by_name.setdefault(name_of(run), []).append(run)
    return runs_by_name


# The runs' own evaluations


def show(runs: list[str], png: Path | None) -> None:
    groups = {name: [learning_curve(run) for run in group] for name, group in _names(runs).items()}
    units = {curve.unit for group in groups.values() for curve in group}
    unit = units.pop() if len(units) == 1 else "score or return"
    print(
        f"| set | training seeds | steps | {unit} offline | at the end | mean of the last {LAST} "
        "| return, after minus before, 95 % interval | by training seed | oldest policy, updates "
        "(bound) | updates a step |"
    )
    print("|---" * 10 + "|")
    for name, group in groups.items():
        print(f"| {' | '.join([name, *_curve_cells(group)])} |")
    print()
    if png is not None:
        _draw(groups, png, unit)


def learning_curve(path: str) -> LearningCurve:
    from m3pc.online.exploration import scaled, score_unit
    from m3pc.online.run_folder import open_run
    from m3pc.telemetry.catalogue import STALENESS
    from m3pc.tracking.run_log import read_metrics

    run = open_run(Path(path))
    rows = read_metrics(run.path, "evaluation")
    if len(rows) < 2 or rows[0]["updates"]:
        raise SystemExit(f"{path} has no evaluation before its first update and one after it")
    name = f"{STALENESS.name}/p100"
    ages = [row[name] for row in read_metrics(run.path, "fleet") if row.get(name) is not None]
    return LearningCurve(
        run=path,
        unit=score_unit(run),
        steps=[row["step"] for row in rows],
        scores=[scaled(run, row["return"]) for row in rows],
        returns=np.array([row["returns"] for row in rows]),
        updates=rows[-1]["updates"],
        oldest=max(ages, default=0.0),  # a lock-step run has none: it is never behind
        bound=run.config.online.pause_after,
    )


def _curve_cells(group: list[LearningCurve]) -> list[str]:
    if len({len(curve.gains) for curve in group}) > 1:
        raise SystemExit(f"{group[0].run} and others of its set have evaluations of other lengths")
    ends = [np.mean(curve.scores[-LAST:]) for curve in group]
    rates = [curve.updates / curve.steps[-1] for curve in group]
    oldest, bound = max(curve.oldest for curve in group), min(curve.bound for curve in group)
    return [
        f"{len(group)}",
        f"{min(curve.steps[-1] for curve in group):,}",
        f"{np.mean([curve.scores[0] for curve in group]):.1f}",
        f"{np.mean([curve.scores[-1] for curve in group]):.1f}",
        f"{np.mean(ends):.1f}",
        *gain_cells(np.stack([curve.gains for curve in group])),
        f"{oldest:g} ({bound:,})",
        ", ".join(sorted({f"{rate:.3f}" for rate in rates})),
    ]


def _draw(groups: dict[str, list[LearningCurve]], png: Path, unit: str) -> None:
    from benchmarks.plots import Curves, curves_by_seed

    panels = [
        Curves(
            title=name,
            runs=[(curve.steps, curve.scores) for curve in group],
            level=float(np.mean([curve.scores[0] for curve in group])),
        )
        for name, group in groups.items()
    ]
    curves_by_seed(png, panels, unit=unit)
    print(f"picture: {png}")


# Fresh episodes


def play_command(options: argparse.Namespace) -> None:
    play(
        options.runs,
        options.out,
        options.jobs,
        episodes=options.episodes,
        planners=options.planner,
    )


def play(
    runs: list[str], out: Path, workers: int, *, episodes: int, planners: Sequence[str] = ()
) -> None:
    jobs = [
        Job(run=run, weights=weights, seed=FRESH_SEED, episodes=episodes, planner=planner)
        for run in runs
        for planner in planners or [""]
        for weights in WEIGHTS
    ]
    play_missing(jobs, out, workers, _played)


def _played(job: Job) -> EvaluationRow:
    from m3pc.evaluation.jobs import EvaluationRequest, make_jobs
    from m3pc.online.run_folder import open_run

    run = open_run(Path(job.run))
    request = EvaluationRequest(
        path=run.offline if job.weights == "offline" else run.path,
        env_id=run.info.env,
        episodes=job.episodes,
        seed=job.seed,
    )
    (evaluation,) = make_jobs(request, [job.planner] if job.planner else [])
    return evaluation.play(lambda numbers: None).as_json()


def compare(results: list[Result[Job]]) -> None:
    by_key = {(x.job.run, _planner(x), x.job.weights): x for x in results}
    print(f"{results[0].job.episodes} fresh episodes a run (seed {FRESH_SEED}); ", end="")
    print(f"engine {results[0].evaluation['engine']}\n")
    print(
        "| set | training seeds | planner | before | after | score before | score after "
        "| after minus before, 95 % interval | by training seed |"
    )
    print("|---" * 9 + "|")
    groups: dict[tuple[str, str], list[str]] = {}
    for run, planner, weights in by_key:
        if weights == "offline" and (run, planner, "finetuned") in by_key:
            groups.setdefault((name_of(run), planner), []).append(run)
    for (name, planner), runs in sorted(groups.items()):
        before, after = ([by_key[run, planner, w] for run in sorted(runs)] for w in WEIGHTS)
        gains = np.stack([b.returns - a.returns for a, b in zip(before, after, strict=True)])
        cells = [name, f"{len(runs)}", planner]
        cells += [
            f"{np.mean([result.returns for result in group]):.0f}" for group in (before, after)
        ]
        cells += [_score(group) for group in (before, after)]
        print(f"| {' | '.join([*cells, *gain_cells(gains)])} |")
    print()


def _planner(result: Result[Job]) -> str:
    return f"{result.evaluation['planner']}@{result.evaluation['ratio']:g}"


def _score(group: list[Result[Job]]) -> str:
    scores = [x.evaluation["score"] for x in group if x.evaluation["score"] is not None]
    return f"{np.mean(scores):.1f}" if scores else ""


if __name__ == "__main__":
    main()
