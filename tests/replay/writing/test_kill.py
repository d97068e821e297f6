"""Writers killed by SIGKILL, on a real disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.episodes.shared_data import ROOT


@pytest.mark.parametrize("points", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_a_killed_writer_has_lost_nothing_that_it_acknowledged(points: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.faults.kill_runner"],
        input=json.dumps({"folder": str(tmp_path), "points": points, "seed": 3}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    totals = json.loads(done.stdout)
    assert totals["points"] == points
    assert totals["acked"] > points  # they were not all killed before they began
    bad = {name: totals[name] for name in ("lost", "duplicated", "gaps", "wrong", "findings")}
    assert bad == dict.fromkeys(bad, 0)
