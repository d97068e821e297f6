"""The benchmark of the online system runs, and counts correctly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.episodes.shared_data import ROOT


@pytest.mark.ray
@pytest.mark.long
def test_the_benchmark_measures_everything_that_it_compares(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "benchmarks.online", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, timeout=280, capture_output=True, check=True)
    numbers = json.loads(out.read_text())
    for row in numbers["actors"]:
        assert row["steps"] > 0 and row["decisions"] > 0
        assert 1 <= row["batch"] <= 4 * int(row["actors"])
        assert 0 < row["stepping"] + row["blocked"] <= 1.01
    batches = {row["way"]: row["batch"] for row in numbers["ways"] if row["mode"] == "rcbc"}
    assert batches["a call for each"] == 1
    assert 1 < batches["one server"] <= 16
    for row in numbers["served"]:
        assert row["rows"] == 8 * row["requests"]
        assert row["direct"] == [1, 1, 1] and row["server"][1] > 0
    for shares in numbers["shares"]["shares"].values():
        assert sum(shares.values()) == pytest.approx(1)
        assert all(-0.05 <= share <= 1.05 for share in shares.values())
    assert done.stdout.decode().count("|") > 100
