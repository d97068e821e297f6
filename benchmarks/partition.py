"""What a run loses while the host of its rollout actors is cut off, and how fast it recovers.

    python -m benchmarks.partition [--seconds 5 60] [--rounds 3] [--actors 2] [--json FILE]

Two network namespaces are two hosts, each with a node of `m3pc node` (this needs root). The head
has store, learner, planner, driver and a Redis; the other host has the actors, so no actor collects
while it is cut off. The link is taken down at the actors' end: the head sees only silence.

stopped   from the cut to the last episode that was stored before the link is up again
dead      from the cut until Ray declared the node dead
deaths    nodes that died by then: more than one if a node that had rejoined died as well
joined    from the link's return until the node has joined again
episode   from the link's return until an episode is stored that was collected since (by a new actor
          process, if the node died)
update    from the link's return until one more update after that
left      episodes stored since the return that the old actors had finished before the cut

At the end the log of every actor is compared with the store.
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
from m3pc.online.delivery_audit import audit_deliveries
from m3pc.types import AppendKey
from replay.store.store import Store
from tests.support.runs.online_job import Job
from tests.support.servers.autoscaling_cluster import Watch
from tests.support.servers.two_hosts import TwoHosts, head_job, missing, two_hosts

PATIENCE = 300.0  # seconds
SETTLE = 10.0  # seconds of work before a cut
POLL_SECONDS = 0.1
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
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    settings = {GRPC: arguments.grpc_timeout} if arguments.grpc_timeout else {}
    with tempfile.TemporaryDirectory() as name, two_hosts(**settings) as hosts:
        run = make_run(Path(name), arguments.actors, "fleet.roles=true")
        hosts.start("head", cpus=2, roles=("learner", "planner"))
        hosts.start("worker", cpus=arguments.actors, roles=("actor",))
        cuts = measure(run, hosts, arguments.seconds, arguments.rounds, arguments.actors)
        fenced = {event: hosts.logged(event) for event in FENCED}
        deliveries = audit_deliveries(run)
    show(cuts)
    print(f"\n{deliveries}; {fenced}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cuts": cuts, "audit": str(deliveries)}))
    sys.exit(0 if deliveries.sound else 1)


Numbers = dict[str, float]


def measure(
    run: Path, hosts: TwoHosts, cuts: list[float], rounds: int, actors: int
) -> dict[str, list[Numbers]]:
    trials: dict[str, list[Numbers]] = {f"{seconds:g} s": [] for seconds in cuts}
    with head_job(run, hosts) as work, hosts.watch() as nodes:
        work.until_up(actors)
        for number in range(rounds):
            for seconds in cuts:
                time.sleep(SETTLE)
                print(f"round {number + 1} of {rounds}: {seconds:g} s", file=sys.stderr)
                trials[f"{seconds:g} s"].append(_cut(work, hosts, nodes, seconds))
        work.signal(signal.SIGTERM)
        assert work.wait() == 0, work.output
    return trials


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
            time.sleep(POLL_SECONDS)
    old = {(key.slot, key.incarnation) for key in known} if "dead" in numbers else set()
    numbers |= _recovered(work, nodes, known, old, died="dead" in numbers)
    numbers["deaths"] = nodes.dead - dead
    since = _keys(work.run) - known
    numbers["left"] = sum((key.slot, key.incarnation) in old for key in since)
    return numbers


def _recovered(
    work: Job, nodes: Watch, known: set[AppendKey], old: set[tuple[int, int]], *, died: bool
) -> Numbers:
    """Times of recovery from now on; the actor processes in `old` are dead."""
    begin, updates = time.monotonic(), -1  # updates: done when the episode was stored
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
        for name, is_over in watched.items():
            if name not in numbers and is_over():
                numbers[name] = now
        if "episode" in numbers and updates < 0:
            updates = int(work.status.get("updates", 0))
        time.sleep(POLL_SECONDS)
    nodes.count()
    return numbers


def _keys(run: Path) -> set[AppendKey]:
    return set(Store(run / "replay").keys)


def show(cuts: dict[str, list[Numbers]]) -> None:
    names = (*TIMES, *COUNTS)
    print(f"\n| cut | trials | {' | '.join(names)} |")
    print("|---|---|" + "---|" * len(names))
    for cut, rows in cuts.items():
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
