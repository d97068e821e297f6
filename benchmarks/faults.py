"""How fast a run recovers from the death of each of its processes, and how much it loses.

    python -m benchmarks.faults [--rounds 5] [--actors 4] [--json FILE]

A run on d4rl/Hopper-v2 with a hardly trained model (so episodes are short) is started by the
command, and its processes are killed in turn. Times are measured from the kill: `back` until the
successor runs, `episode` until the store has one more episode after that (of the same slot, if an
actor died), `update` until the learner has done one more update after that. `kept` is the rate of
steps in the ten seconds after the fault over that in the ten seconds before. Times are read from
the run's own status, which is written twice a second. At the end the log of every actor is compared
with the store.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from m3pc.cli.options import open_store
from m3pc.config.overrides import override
from m3pc.config.presets import resolve
from m3pc.model import checkpoint
from m3pc.online.delivery_audit import audit_deliveries
from m3pc.online.run_folder import create_run as start_online
from m3pc.training import pretrain
from replay.store.store import Store
from tests.support.runs.online_job import Job

DATA = "shipped:hopper-medium-replay"
PARTS = ("actor-0", "planner-0", "store", "learner", "evaluator")
SECONDS = 10.0  # of a rate
PATIENCE = 180.0
PRETRAINING = (
    "pretrain.updates=20",
    "pretrain.warmup=5",
    "critic.regression_updates=10",
    "critic.updates=10",
)
SETTINGS = (
    "online.steps=100000000",
    "planner.mode=q",
    "online.updates_per_step=0.02",  # so that no actor waits for the learner
    "online.critic_updates=1",
    "online.publish_every=10",
    "online.checkpoint_every=50",
    "evaluation.episodes=2",
    "evaluation.every=2000",
    "fleet.receipts=true",
    "planner.candidates=16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        run = make_run(Path(name), arguments.actors)
        faults = measure(run, arguments.rounds, arguments.actors)
        deliveries = audit_deliveries(run)
    show(faults)
    print(f"\n{deliveries}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"faults": faults, "audit": str(deliveries)}))
    sys.exit(0 if deliveries.sound else 1)


def make_run(folder: Path, actors: int, *more: str) -> Path:
    """A new run; `more` are further settings."""
    data = open_store(DATA)
    pretrain.create_run(data, resolve(preset="small", sets=PRETRAINING), folder / "pre")
    pretrain.resume(folder / "pre", lambda numbers: None)
    source = checkpoint.read(folder / "pre")
    config = override(source.weights.config, [*SETTINGS, f"fleet.actors={actors}", *more])
    start_online(source, data, "d4rl/Hopper-v2", config, folder / "run")
    return folder / "run"


def measure(run: Path, rounds: int, actors: int) -> dict[str, list[dict[str, float]]]:
    faults: dict[str, list[dict[str, float]]] = {}
    work = Job(run)
    try:
        begin = time.monotonic()
        work.until_up(actors)
        faults["start"] = [{"episode": time.monotonic() - begin}]
        for number in range(rounds):
            for part in PARTS:
                print(f"round {number + 1} of {rounds}: {part}", file=sys.stderr)
                faults.setdefault(f"kill -9 {part}", []).append(_killed(work, part))
        for name, how in (("SIGTERM", signal.SIGTERM), ("kill -9 driver", signal.SIGKILL)):
            for _ in range(max(1, rounds // 2)):
                numbers, work = _ended(work, how, actors)
                faults.setdefault(name, []).append(numbers)
        work.signal(signal.SIGTERM)
        work.wait()
    finally:
        work.end()
    return faults


def _killed(work: Job, part: str) -> dict[str, float]:
    before = _rate(work)
    steps, begin = work.steps, time.monotonic()
    pid = work.kill(part)
    known, updates = -1, -1  # episodes and updates when the successor runs
    watched: dict[str, Callable[[], bool]] = {
        "back": lambda: work.pid(part) not in (None, pid),
        "update": lambda: 0 <= updates < _updates(work),
        "episode": lambda: 0 <= known < _episodes(work.run, part),
    }
    numbers: dict[str, float] = {}
    while len(numbers) < len(watched):
        now = time.monotonic() - begin
        assert now < PATIENCE, (part, numbers, work.status)
        for name, is_over in watched.items():
            if name not in numbers and is_over():
                numbers[name] = now
        if "back" in numbers and known < 0:
            known, updates = _episodes(work.run, part), _updates(work)
        time.sleep(0.05)
    while time.monotonic() - begin < SECONDS:
        time.sleep(0.1)
    numbers["kept"] = (work.steps - steps) / (time.monotonic() - begin) / before
    return numbers


def _updates(work: Job) -> int:
    return int(work.status.get("updates", 0))


def _rate(work: Job) -> float:
    steps, begin = work.steps, time.monotonic()
    time.sleep(SECONDS)
    return max(work.steps - steps, 1) / (time.monotonic() - begin)


def _episodes(run: Path, part: str) -> int:
    """Stored so far: of the actor's slot if `part` is an actor, else of all slots."""
    keys = Store(run / "replay").keys
    kind, _, slot = part.partition("-")
    return sum(key.slot == int(slot) for key in keys) if kind == "actor" else len(keys)


def _ended(work: Job, how: int, actors: int) -> tuple[dict[str, float], Job]:
    """End the run and resume it on a new cluster."""
    begin = time.monotonic()
    work.signal(how)
    code = work.wait()
    numbers: dict[str, Any] = {"ended": time.monotonic() - begin, "code": code}
    known, begin = _episodes(work.run, "store"), time.monotonic()
    again = Job(work.run)
    again.until(lambda: _episodes(work.run, "store") > known)
    numbers["episode"] = time.monotonic() - begin
    again.until_up(actors)
    return numbers, again


def show(faults: dict[str, list[dict[str, float]]]) -> None:
    names = ("ended", "back", "episode", "update", "kept")
    print(f"\n| fault | trials | {' | '.join(names)} | exit codes |")
    print("|---|---|" + "---|" * (len(names) + 1))
    for fault, rows in faults.items():
        cells = [_cell(name, [row[name] for row in rows if name in row]) for name in names]
        codes = sorted({f"{row['code']:g}" for row in rows if "code" in row})
        print(f"| {fault} | {len(rows)} | {' | '.join(cells)} | {', '.join(codes)} |")


def _cell(name: str, values: list[float]) -> str:
    if not values:
        return ""
    unit = "" if name == "kept" else " s"
    worst = min(values) if name == "kept" else max(values)
    return f"{np.median(values):.1f}{unit} (worst {worst:.1f})"


if __name__ == "__main__":
    main()
