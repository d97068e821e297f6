"""How finetuning online pays: finished runs, before and after.

python -m benchmarks.o2o show RUN [RUN ...] [--png figure.png]          the runs' own evaluations
python -m benchmarks.o2o play RUN [RUN ...] --out results.jsonl         both, on fresh seeds
python -m benchmarks.o2o compare results.jsonl                          prints what was played

A run is a folder NAME-SEED made by `m3pc finetune`; runs of one NAME differ in their training seed.
Before and after are played on the same episodes, by the planners that are named (rcbc@0.4: asked
for 0.4 times the best return) or else by the one that the run was evaluated with.
Started again, `play` plays only what is not in the file yet; runs are known by their path.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.played import Doubles, Found, Result, finish, gain_cells, name_of, read

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
class Learned:
    """What a run says of itself in its metrics."""

    run: str
    unit: str  # of scores: that of D4RL's scale, or the return itself
    steps: list[int]  # of its evaluations
    scores: list[float]
    returns: Doubles  # [evaluations, episodes]
    updates: int  # at the last evaluation
    oldest: float  # updates that the learner was ahead of an episode's policy, at most
    bound: int  # beyond which a policy is not acted by

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
    showing.set_defaults(do=lambda given: show(given.runs, given.png))
    playing = commands.add_parser("play")
    playing.add_argument("runs", nargs="+")
    playing.add_argument("--out", type=Path, required=True)
    playing.add_argument("--jobs", type=int, default=2)
    playing.add_argument("--episodes", type=int, default=FRESH_EPISODES)
    playing.add_argument("--planner", action="append", default=[])
    playing.set_defaults(do=play_asked)
    comparing = commands.add_parser("compare")
    comparing.add_argument("results", type=Path)
    comparing.set_defaults(do=lambda given: compare(read(given.results, Job)))
    given = parser.parse_args()
    given.do(given)


def _names(runs: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(name_of(run), []).append(run)
    return found


# What the runs say themselves


def show(runs: list[str], png: Path | None) -> None:
    groups = {name: [learned(run) for run in group] for name, group in _names(runs).items()}
    units = {one.unit for group in groups.values() for one in group}
    unit = units.pop() if len(units) == 1 else "score or return"
    print(
        f"| set | training seeds | steps | {unit} offline | at the end | mean of the last {LAST} "
        "| return, after minus before, 95 % interval | by training seed | oldest policy, updates "
        "(bound) | updates a step |"
    )
    print("|---" * 10 + "|")
    for name, group in groups.items():
        print(f"| {' | '.join([name, *_learned_cells(group)])} |")
    print()
    if png is not None:
        _draw(groups, png, unit)


def learned(path: str) -> Learned:
    from m3pc.online.exploration import scaled, score_unit
    from m3pc.online.run_folder import open_run
    from m3pc.telemetry.catalogue import STALENESS
    from m3pc.tracking.run_log import read as read_metrics

    run = open_run(Path(path))
    rows = read_metrics(run.path, "evaluation")
    if len(rows) < 2 or rows[0]["updates"]:
        raise SystemExit(f"{path} has no evaluation before its first update and one after it")
    name = f"{STALENESS.name}/p100"
    ages = [row[name] for row in read_metrics(run.path, "fleet") if row.get(name) is not None]
    return Learned(
        run=path,
        unit=score_unit(run),
        steps=[row["step"] for row in rows],
        scores=[scaled(run, row["return"]) for row in rows],
        returns=np.array([row["returns"] for row in rows]),
        updates=rows[-1]["updates"],
        oldest=max(ages, default=0.0),  # none is written in lock-step, where none is behind
        bound=run.config.online.pause_after,
    )


def _learned_cells(group: list[Learned]) -> list[str]:
    if len({len(one.gains) for one in group}) > 1:
        raise SystemExit(f"{group[0].run} and others of its set have evaluations of other lengths")
    ends = [np.mean(one.scores[-LAST:]) for one in group]
    rates = [one.updates / one.steps[-1] for one in group]
    oldest, bound = max(one.oldest for one in group), min(one.bound for one in group)
    return [
        f"{len(group)}",
        f"{min(one.steps[-1] for one in group):,}",
        f"{np.mean([one.scores[0] for one in group]):.1f}",
        f"{np.mean([one.scores[-1] for one in group]):.1f}",
        f"{np.mean(ends):.1f}",
        *gain_cells(np.stack([one.gains for one in group])),
        f"{oldest:g} ({bound:,})",
        ", ".join(sorted({f"{rate:.3f}" for rate in rates})),
    ]


def _draw(groups: dict[str, list[Learned]], png: Path, unit: str) -> None:
    from m3pc.plots import Curves, curves_by_seed

    panels = [
        Curves(
            title=name,
            runs=[(one.steps, one.scores) for one in group],
            level=float(np.mean([one.scores[0] for one in group])),
        )
        for name, group in groups.items()
    ]
    curves_by_seed(png, panels, unit=unit)
    print(f"picture: {png}")


# Fresh episodes


def play_asked(given: argparse.Namespace) -> None:
    play(given.runs, given.out, given.jobs, episodes=given.episodes, planners=given.planner)


def play(
    runs: list[str], out: Path, workers: int, *, episodes: int, planners: Sequence[str] = ()
) -> None:
    jobs = [
        Job(run=run, weights=weights, seed=FRESH_SEED, episodes=episodes, planner=planner)
        for run in runs
        for planner in planners or [""]
        for weights in WEIGHTS
    ]
    finish(jobs, out, workers, _played)


def _played(job: Job) -> Found:
    from m3pc.evaluation.evaluate import EvaluationRequest, matches
    from m3pc.online.run_folder import open_run

    run = open_run(Path(job.run))
    order = EvaluationRequest(
        path=run.offline if job.weights == "offline" else run.path,
        env_id=run.facts.env,
        episodes=job.episodes,
        seed=job.seed,
    )
    (match,) = matches(order, [job.planner] if job.planner else [])
    return match.play(lambda numbers: None).as_json()


def compare(results: list[Result[Job]]) -> None:
    found = {(one.job.run, _planner(one), one.job.weights): one for one in results}
    print(f"{results[0].job.episodes} fresh episodes a run (seed {FRESH_SEED}); ", end="")
    print(f"engine {results[0].found['engine']}\n")
    print(
        "| set | training seeds | planner | before | after | score before | score after "
        "| after minus before, 95 % interval | by training seed |"
    )
    print("|---" * 9 + "|")
    groups: dict[tuple[str, str], list[str]] = {}
    for run, planner, weights in found:
        if weights == "offline" and (run, planner, "finetuned") in found:
            groups.setdefault((name_of(run), planner), []).append(run)
    for (name, planner), runs in sorted(groups.items()):
        before, after = ([found[run, planner, w] for run in sorted(runs)] for w in WEIGHTS)
        gains = np.stack([b.returns - a.returns for a, b in zip(before, after, strict=True)])
        cells = [name, f"{len(runs)}", planner]
        cells += [f"{np.mean([one.returns for one in group]):.0f}" for group in (before, after)]
        cells += [_score(group) for group in (before, after)]
        print(f"| {' | '.join([*cells, *gain_cells(gains)])} |")
    print()


def _planner(result: Result[Job]) -> str:
    return f"{result.found['planner']}@{result.found['ratio']:g}"


def _score(group: list[Result[Job]]) -> str:
    scores = [one.found["score"] for one in group if one.found["score"] is not None]
    return f"{np.mean(scores):.1f}" if scores else ""


if __name__ == "__main__":
    main()
