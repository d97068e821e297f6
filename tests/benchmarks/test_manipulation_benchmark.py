"""The benchmark of success rates: reading finished trials, and the table of them."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import manipulation, plots
from benchmarks.manipulation import FRESH_SEED, TUNING_SEED, Job

TRIALS = {  # by run and planner: which of four trials succeeded
    ("runs/lift-0", "rcbc"): [True, False, False, False],
    ("runs/lift-1", "rcbc"): [True, True, False, False],
    ("runs/lift-0", "q"): [True, True, True, False],
    ("runs/lift-1", "q"): [True, True, True, True],
}


def write_trials(
    path: Path, seed: int = FRESH_SEED, settings: str = "", ratio: float = 1.0
) -> None:
    with path.open("a", encoding="utf-8") as file:
        for (run, method), successes in TRIALS.items():
            job = Job(run=run, method=method, ratio=ratio, settings=settings, seed=seed, episodes=4)
            row = {
                "engine": "an engine",
                "successes": successes,
                "lengths": [40 if success else 400 for success in successes],
                "returns": successes,
                "effective": [10 * (1 + int(run[-1])) + number for number in range(4)],
            }
            file.write("\n" + json.dumps({"job": asdict(job), "found": row}))


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["manipulation", *map(str, words)])
    manipulation.main()


def cells(out: str, method: str) -> list[str]:
    (line,) = (line for line in out.splitlines() if line.startswith(f"| lift | {method} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_runs_of_one_name_are_a_row_with_a_difference_paired_by_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trials(tmp_path / "results.jsonl")
    picture = tmp_path / "rates.png"
    command(monkeypatch, "show", tmp_path / "results.jsonl", "--png", picture)
    out = capsys.readouterr().out
    assert out.startswith(f"4 trials of seed {FRESH_SEED} a run; engine an engine")
    plain, planned = cells(out, "rcbc"), cells(out, "q")
    assert plain[4].startswith("0.38 (") and plain[5:] == ["0.25, 0.50", "40", "", ""]
    assert planned[4].startswith("0.88 (") and planned[5] == "0.75, 1.00"
    assert planned[7].startswith("+0.50 (") and planned[8] == "11.5, 21.5"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_settings_have_bars_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, drawn = tmp_path / "results.jsonl", dict[str, Any]()
    write_trials(results)
    write_trials(results, settings="planner.utility=raw", ratio=0.9)
    monkeypatch.setattr(plots, "success_rates", lambda path, bars, title: drawn.update(bars))
    command(monkeypatch, "show", results, "--png", tmp_path / "rates.png")
    names = ["rcbc", "q", "rcbc@0.9 planner.utility=raw", "q@0.9 planner.utility=raw"]
    assert list(drawn["lift"]) == names


def test_trials_of_tuning_are_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    write_trials(results, seed=TUNING_SEED)
    command(monkeypatch, "show", results, "--tuning")
    assert f"seed {TUNING_SEED} " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no trials"):
        command(monkeypatch, "show", results)


def test_finished_trials_are_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.jsonl"
    write_trials(results)
    before = results.read_bytes()
    words = ["play", "runs/lift-0", "runs/lift-1", "--planner", "rcbc", "q", "--trials", 4]
    command(monkeypatch, *words, "--out", results)  # there are no such runs to play
    assert results.read_bytes() == before
