"""A planner server under full load, compared with the direct call on the same rows."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.rollout_system import PATIENCE, System
from benchmarks.tables import judge, ratios, shown, table
from m3pc.config.overrides import replace
from m3pc.config.schema import Mode
from m3pc.model import checkpoint
from m3pc.model.weights import Weights
from m3pc.types import Decision, PlanRequest, Window
from planner.policy import Policy
from planner.server.client import PlannerClient
from planner.server.service import PlannerService

AHEAD = 2  # batches requested before the first is answered
AIM = 0.9
HEAD = (
    *("mode", "rows", "requests", "direct decisions/s", "server's decisions/s"),
    *("server / direct", "by CPU", "without Ray / direct", "by CPU"),
)

Submit = Callable[[PlanRequest], Callable[[], object]]  # returns a function that waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one mode that make up one batch."""

    mode: Mode
    asks: tuple[PlanRequest, ...]

    @property
    def rows(self) -> int:
        return sum(len(ask.window) for ask in self.asks)


class Timing(NamedTuple):
    seconds: float  # for the timed batches
    computed: int  # all batches, also those before and after the timed ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    run: Callable[[Load, int], Timing]
    cpu: Callable[[], float]  # processor seconds used so far

    def speeds(self, requests: Load, batches: int) -> tuple[float, float]:
        """Decisions per second, and per second of processor time."""
        before = self.cpu()
        timing = self.run(requests, batches)
        cpu = self.cpu() - before
        return requests.rows * batches / timing.seconds, requests.rows * timing.computed / cpu


def report_served(
    system: System,
    source: Path,
    modes: Sequence[Mode],
    sizes: Sequence[tuple[int, int]],
    *,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """`sizes`: environments of a batch and of each of its requests."""
    weights = checkpoint.read(source).weights
    width = weights.config.model.width
    rows = []
    for batch, request in sizes:
        settings = {"fleet.batch": batch}
        name = system.serve(f"width-{width}-batch-{batch}-{request}", settings, source)
        with closing(PlannerService(weights, replace(weights.config, settings))) as service:
            kinds = {
                "direct": Kind(run=partial(direct, Policy(weights)), cpu=time.process_time),
                "batcher": Kind(run=partial(served, in_process(service)), cpu=time.process_time),
                "server": Kind(
                    run=partial(served, over_ray(system.client([name], 0))),
                    cpu=partial(system.planner_cpu, name),
                ),
            }
            loads = [load(weights, mode, batch, request) for mode in modes]
            rows += [_row(requests, kinds, rounds, seconds) for requests in loads]
    print(
        f"\n### The server and the direct call, width {width}\n\n"
        f"{AHEAD} batches on their way; {rounds} rounds. "
        "By CPU: decisions per second of processor time of the server's process. Without Ray: the "
        "batcher and its thread alone.\n"
    )
    compared = ["server", "server by CPU", "batcher", "batcher by CPU"]
    table(
        HEAD,
        [
            [
                *(row["mode"], str(row["rows"]), str(row["requests"])),
                *(f"{row['decisions'][kind]:.0f}" for kind in ("direct", "server")),
                *(shown(row[name]) for name in compared),
            ]
            for row in rows
        ],
    )
    print()
    for row in rows:
        what = f"server / direct, width {width}, {row['mode']}, {row['rows']} rows"
        what += f" in {row['requests']} request(s)"
        judge(what, row["server"][1], AIM)
    return rows


def load(weights: Weights, mode: Mode, rows: int, count: int) -> Load:
    """Random windows in the middle of episodes, `count` in each request."""
    rng, config = np.random.default_rng(0), weights.config
    length = config.model.window

    def window(first: int) -> Window:
        return Window(
            states=rng.standard_normal((count, length, weights.state_size), np.float32),
            actions=rng.uniform(-1, 1, (count, length, weights.action_size)).astype(np.float32),
            now=np.full(count, config.context, np.int64),
            steps=np.full(count, 100, np.int64),
            seeds=np.arange(first, first + count, dtype=np.int64),
        )

    asks = (PlanRequest(window=window(n), mode=mode, explore=True) for n in range(0, rows, count))
    return Load(mode=mode, asks=tuple(asks))


def direct(policy: Policy, requests: Load, batches: int) -> Timing:
    begin = time.perf_counter()
    for _ in range(batches):
        policy.answer(requests.asks)
    return Timing(time.perf_counter() - begin, batches)


def in_process(service: PlannerService) -> Submit:
    def submit(ask: PlanRequest) -> Callable[[], object]:
        return partial(service.submit(ask, PATIENCE).result, PATIENCE)

    return submit


def over_ray(client: PlannerClient) -> Submit:
    def submit(ask: PlanRequest) -> Callable[[], object]:
        return partial(client.ask(ask).result, PATIENCE)

    return submit


def served(submit: Submit, requests: Load, batches: int) -> Timing:
    """Times batches in the middle of a stream, so that the server never waits for work."""
    waiting = deque(submit(ask) for ask in requests.asks * AHEAD)

    def answered() -> None:
        for ask in requests.asks:
            decision = waiting.popleft()()
            assert isinstance(decision, Decision), decision
            waiting.append(submit(ask))

    answered()
    begin = time.perf_counter()
    for _ in range(batches):
        answered()
    seconds = time.perf_counter() - begin
    while waiting:
        waiting.popleft()()
    return Timing(seconds, batches + 1 + AHEAD)


def _row(requests: Load, kinds: Mapping[str, Kind], rounds: int, seconds: float) -> dict[str, Any]:
    kinds["direct"].run(requests, 2)
    batches = max(3, round(seconds / kinds["direct"].run(requests, 1).seconds))
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            speeds[name].append(kind.speeds(requests, batches))
    row: dict[str, Any] = {"mode": requests.mode, "rows": requests.rows, "batches": batches}
    row["requests"] = len(requests.asks)
    row["decisions"] = {
        name: float(np.median([speed for speed, _ in measured]))
        for name, measured in speeds.items()
    }
    for name, measured in speeds.items():
        for n, suffix in enumerate(("", " by CPU")):
            below = [speed[n] for speed in speeds["direct"]]
            row[name + suffix] = ratios([speed[n] for speed in measured], below)
    return row
