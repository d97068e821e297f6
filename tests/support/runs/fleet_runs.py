"""Online runs on Ray for tests: their settings, the command from another shell, how they end."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from m3pc.model import checkpoint
from m3pc.online.run_folder import open_run
from replay.server.schedule import schedule_of
from replay.store.store import Store
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.online_job import job

FLEET: dict[str, Any] = {
    "online__steps": 10**6,
    "online__publish_every": 5,
    "online__checkpoint_every": 20,
    "evaluation__every": 300,
    "fleet__actors": 2,
    "fleet__receipts": True,
}
PARTS = ("actor-0", "planner-0", "store", "learner", "evaluator")


def m3pc(*words: object) -> "subprocess.CompletedProcess[str]":
    """The command, from another shell."""
    return subprocess.run(
        [sys.executable, "-m", "m3pc", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def command(*words: object) -> str:
    """The output of a command that succeeds."""
    done = m3pc(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def owed(run: Path) -> int:
    """Updates, by what the store holds."""
    store, opened = Store(run / "replay"), open_run(run)
    schedule = schedule_of(opened.config.online, opened.info.max_episode_steps)
    return schedule.owed(int(store.lengths.sum()), len(store.lengths))


def updates(run: Path) -> int:
    return int(checkpoint.read_newest(run / "checkpoints").progress["updates"])


def finish(run: Path, steps: int, **environment: str) -> None:
    """Resume a run, on a new cluster, to an end that is `steps` later than now."""
    path = run / "config.yaml"
    total = int(Store(run / "replay").lengths.sum()) + steps
    path.write_text(path.read_text().replace("steps: 1000000", f"steps: {total}"))
    with job(run, **environment) as work:
        assert work.wait() == 0, work.output
        assert "finished" in work.output
