"""The benchmark of finetuning: what it reads from finished runs, and what it plays."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import o2o, result_file
from m3pc.evaluation.episodes import evaluate
from m3pc.evaluation.statistics import bootstrap_interval
from m3pc.model import checkpoint
from m3pc.online.local import run_local
from m3pc.tracking import run_log
from planner.policy import Policy
from tests.support.envs.point import POINT
from tests.support.runs.small_online import new_run
from tests.support.runs.small_run import ignore


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two training seeds of one set."""
    folder = tmp_path_factory.mktemp("o2o")
    for seed in (0, 1):
        run = new_run(folder / f"point-{seed}", seed=seed, online__steps=120, evaluation__every=50)
        run_local(run.path, ignore)
    return [str(folder / f"point-{seed}") for seed in (0, 1)]


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["o2o", *map(str, words)])
    o2o.main()


def cells(out: str, name: str) -> list[str]:
    (line,) = (line for line in out.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_runs_of_one_name_are_a_row_with_a_paired_difference(
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(monkeypatch, "show", *runs, "--png", tmp_path / "curves.png")
    out = capsys.readouterr().out
    rows = [run_log.read_metrics(Path(run), "evaluation") for run in runs]
    gains = np.array([np.subtract(r[-1]["returns"], r[0]["returns"]) for r in rows])
    low, high = bootstrap_interval(gains)
    row_cells = cells(out, "point")
    assert row_cells[:2] == ["point", "2"]
    assert row_cells[3] == f"{np.mean([r[0]['return'] for r in rows]):.1f}"
    assert row_cells[4] == f"{np.mean([r[-1]['return'] for r in rows]):.1f}"
    assert row_cells[5] == f"{np.mean([x['return'] for r in rows for x in r[-3:]]):.1f}"
    assert row_cells[6] == f"{gains.mean():+.0f} ({low:+.0f} to {high:+.0f})"
    rates = {f"{r[-1]['updates'] / r[-1]['step']:.3f}" for r in rows}
    assert row_cells[8:] == ["0 (5,000)", ", ".join(sorted(rates))]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_oldest_policy_is_the_oldest_of_all_reports(runs: list[str], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / "point-9")
    with (tmp_path / "point-9" / run_log.NAME).open("a") as file:
        for age in (25.0, 250.0, None, 100.0):
            row = {"step": 1, "group": "fleet", "m3pc_actor_policy_staleness_updates/p100": age}
            file.write(json.dumps(row) + "\n")
    assert o2o.learning_curve(str(tmp_path / "point-9")).oldest == 250
    assert o2o.learning_curve(runs[0]).oldest == 0


def test_a_run_that_was_never_evaluated_twice_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path / "point-0")
    with pytest.raises(SystemExit, match="no evaluation before its first update"):
        o2o.learning_curve(str(run.path))


def test_before_and_after_are_played_on_fresh_seeds_once(
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def threads(workers: int, mp_context: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(result_file, "ProcessPoolExecutor", threads)
    out = tmp_path / "results.jsonl"
    o2o.play(runs[:1], out, 1, episodes=2)
    out.write_text(out.read_text() + '\n{"job": {"run": "cut off by a ki')
    o2o.play(runs, out, 1, episodes=2)
    assert capsys.readouterr().out.count("/2 Job(") == 4  # two, then only the other two
    results = result_file.read_results(out, o2o.Job)
    assert [(one.job.run, one.job.weights) for one in results] == [
        (run, weights) for run in runs for weights in ("offline", "finetuned")
    ]
    for one in results:
        path = Path(one.job.run)
        source = path / "offline" if one.job.weights == "offline" else path
        assert one.evaluation["weights"] == checkpoint.read(source).weights.digest
        assert (one.evaluation["planner"], one.evaluation["seed"]) == ("q", o2o.FRESH_SEED)
    weights = checkpoint.read(runs[0]).weights
    by_hand = evaluate(
        POINT,
        Policy(weights),
        episodes=2,
        seed=o2o.FRESH_SEED,
        slots=2,
    )
    assert results[1].returns.tolist() == by_hand.returns.tolist()
    command(monkeypatch, "compare", out)
    row_cells = cells(capsys.readouterr().out, "point")
    before, after = (np.stack([results[n].returns for n in rows]) for rows in ((0, 2), (1, 3)))
    assert row_cells[:5] == ["point", "2", "q@1", f"{before.mean():.0f}", f"{after.mean():.0f}"]
    low, high = bootstrap_interval(after - before)
    assert row_cells[7] == f"{(after - before).mean():+.0f} ({low:+.0f} to {high:+.0f})"
    o2o.play(runs, out, 1, episodes=2, planners=["rcbc@0.4"])
    capsys.readouterr()
    command(monkeypatch, "compare", out)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[2] for row in rows if row.startswith("| point")] == ["q@1", "rcbc@0.4"]


def test_the_weights_that_a_run_started_from_stay_with_it(runs: list[str]) -> None:
    for run in runs:
        first = checkpoint.read(Path(run) / "offline").weights
        assert first.digest == json.loads((Path(run) / "run.json").read_text())["source"]
        assert first.config == checkpoint.read(run).weights.config
