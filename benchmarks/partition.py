"""What it costs a run when the host of its rollout actors is cut off, and what is lost by it.

    python -m benchmarks.partition [--seconds 5 60] [--rounds 3] [--actors 2] [--json FILE]

Two network namespaces are two hosts, each with a node as `m3pc node` starts it (this needs root).
The head has store, learner, planner, driver and a Redis, the other host has the actors: while it
is cut off nobody collects. The cable is pulled at the actors' end, so the head sees only silence.

stopped   from the cut to the last episode that was still stored before the cable is back
dead      from the cut until Ray declared the node dead
deaths    nodes that died by then: more than one, if one that had joined again died as well
joined    from when the cable is back until the node is there again
episode   from then too, until an episode is stored that a living actor has collected since: where
          the node died that is one of another process than before
update    from then too, until one more update after that
left      episodes stored since that the actors had finished when they were cut off

At the end every actor's own log is compared with the store.
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

import numpy as np

from benchmarks.faults import make_run
from m3pc.online.delivery_audit import audit
from m3pc.types import AppendKey
from replay.store.store import Store
from tests.support.runs.online_job import Job
from tests.support.servers.autoscaling_cluster import Watch
from tests.support.servers.two_hosts import TwoHosts, head_job, missing, two_hosts

PATIENCE = 300.0  # seconds
SETTLE = 10.0  # seconds of work before a cut
PAUSE = 0.1  # seconds between two looks
GRPC = "RAY_grpc_client_keepalive_timeout_ms"
TIMES, COUNTS = ("stopped", "dead", "joined", "episode", "update"), ("deaths", "left")
FENCED = ("slot-lost", "outbox-fenced")  # in the logs of actors that had been replaced


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, nargs="+", default=[5.0, 60.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--grpc-timeout", help=f"milliseconds: {GRPC}, if not as m3pc sets it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    settings = {GRPC: given.grpc_timeout} if given.grpc_timeout else {}
    with tempfile.TemporaryDirectory() as name, two_hosts(**settings) as hosts:
        run = make_run(Path(name), given.actors, "fleet.roles=true")
        hosts.start("head", cpus=2, roles=("learner", "planner"))
        hosts.start("worker", cpus=given.actors, roles=("actor",))
        found = measure(run, hosts, given.seconds, given.rounds, given.actors)
        fenced = {event: hosts.logged(event) for event in FENCED}
        checked = audit(run)
    show(found)
    print(f"\n{checked}; {fenced}")
    if given.json:
        given.json.write_text(json.dumps({"cuts": found, "audit": str(checked)}))
    sys.exit(0 if checked.sound else 1)


Numbers = dict[str, float]


def measure(
    run: Path, hosts: TwoHosts, cuts: list[float], rounds: int, actors: int
) -> dict[str, list[Numbers]]:
    found: dict[str, list[Numbers]] = {f"{seconds:g} s": [] for seconds in cuts}
    with head_job(run, hosts) as work, hosts.watch() as nodes:
        work.until_up(actors)
        for number in range(rounds):
            for seconds in cuts:
                time.sleep(SETTLE)
                print(f"round {number + 1} of {rounds}: {seconds:g} s", file=sys.stderr)
                found[f"{seconds:g} s"].append(_cut(work, hosts, nodes, seconds))
        work.signal(signal.SIGTERM)
        assert work.wait() == 0, work.output
    return found


def _cut(work: Job, hosts: TwoHosts, nodes: Watch, seconds: float) -> Numbers:
    numbers: Numbers = {}
    nodes.count()
    dead, known = nodes.dead, _keys(work.run)
    with hosts.cut():
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < seconds:
            if nodes.count() == 1:
                numbers.setdefault("dead", now)
            if (keys := _keys(work.run)) != known:
                known, numbers["stopped"] = keys, now
            time.sleep(PAUSE)
    old = {(key.slot, key.incarnation) for key in known} if "dead" in numbers else set()
    numbers |= _recovered(work, nodes, known, old, died="dead" in numbers)
    numbers["deaths"] = nodes.dead - dead
    since = _keys(work.run) - known
    numbers["left"] = sum((key.slot, key.incarnation) in old for key in since)
    return numbers


def _recovered(
    work: Job, nodes: Watch, known: set[AppendKey], old: set[tuple[int, int]], *, died: bool
) -> Numbers:
    """Since now; whoever is among `old` lives no more."""
    begin, updates = time.monotonic(), -1  # updates: when the episode had come
    numbers: Numbers = {}
    watched: dict[str, Callable[[], bool]] = {
        "episode": lambda: any(key[:2] not in old for key in _keys(work.run) - known),
        "update": lambda: 0 <= updates < int(work.status.get("updates", 0)),
    }
    if died:
        watched["joined"] = lambda: nodes.count() > 1
    while len(numbers) < len(watched):
        now = time.monotonic() - begin
        assert now < PATIENCE and work.process.poll() is None, (numbers, work.status)
        for name, has_come in watched.items():
            if name not in numbers and has_come():
                numbers[name] = now
        if "episode" in numbers and updates < 0:
            updates = int(work.status.get("updates", 0))
        time.sleep(PAUSE)
    nodes.count()
    return numbers


def _keys(run: Path) -> set[AppendKey]:
    return set(Store(run / "replay").keys)


def show(found: dict[str, list[Numbers]]) -> None:
    names = (*TIMES, *COUNTS)
    print(f"\n| cut | trials | {' | '.join(names)} |")
    print("|---|---|" + "---|" * len(names))
    for cut, rows in found.items():
        cells = [_cell(name, [row[name] for row in rows if name in row]) for name in names]
        print(f"| {cut} | {len(rows)} | {' | '.join(cells)} |")


def _cell(name: str, values: list[float]) -> str:
    if not values:
        return ""
    if name in COUNTS:
        return ", ".join(f"{value:g}" for value in values)
    return f"{np.median(values):.1f} s (worst {max(values):.1f})"


if __name__ == "__main__":
    main()
