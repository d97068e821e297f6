"""What a live store costs: sampling while producers append, appending, and all its protections.

    python -m benchmarks.replay [--quick] [--dir FOLDER]

Everything that is compared is measured in turns within one run, so that a noisy machine disturbs it
alike; what counts is the median of the ratios of neighbouring turns, with its quartiles. Sampling
draws windows of 8 steps in batches of 512, hopper's sizes, from three processes: 8 producers, the
store, a learner that only draws batches. Linux only: processor times come from /proc.

Ends with one line of JSON. Every store is compared with what its producers were acknowledged.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.appends import BLOCK, MODES, Burst, Mode, burst, raw_syncs, roll_seconds
from benchmarks.live_system import BATCH, LENGTH, PRODUCERS, System, Turn
from benchmarks.traffic import Audit, parcels

USUAL, HARD = 2_000, 20_000  # transitions a second, all producers together


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    fill: int = 300_000  # transitions in a store before it is measured
    refresh: int = 1000  # updates between two refreshes of the view
    turns: int = 9  # of sampling
    pairs: int = 20  # of turns with and without protections
    seconds: float = 2.0  # of a turn
    bursts: int = 3  # for each way to append
    burst_seconds: float = 1.5
    producers: tuple[int, ...] = (1, 8, 64)
    syncs: int = 100  # raw ones, before each round of bursts
    rolled: int = 64 << 20  # bytes of log


QUICK = Size(
    fill=20_000,
    refresh=50,
    turns=1,
    pairs=1,
    seconds=0.3,
    bursts=1,
    burst_seconds=0.1,
    producers=(1, 3),
    syncs=5,
    rolled=1 << 20,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to be measured")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        folder = Path(name).resolve()
        where = {"filesystem": filesystem(folder), "cores": os.cpu_count()}
        print(f"{where['cores']} cores, {where['filesystem']}, load {os.getloadavg()[0]:.1f}")
        results = {
            "sampling": report_sampling(folder, size),
            "appending": report_appending(folder, size),
            "protections": report_protections(folder, size),
        }
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    print(json.dumps({"machine": where, **results}))


def filesystem(folder: Path) -> str:
    """Type of the file system that holds the folder: that of its innermost mount."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(len(at), kind) for _, at, kind, *_ in mounts if folder.is_relative_to(at)]
    return max(above)[1]


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(float(value), 4) for value in np.quantile(values, (0.25, 0.5, 0.75))]


def ratios(
    tops: Sequence[Turn], bottoms: Sequence[Turn], of: Callable[[Turn], float]
) -> list[float]:
    """Quartiles over neighbouring turns."""
    return quartiles([of(top) / of(bottom) for top, bottom in zip(tops, bottoms, strict=True)])


def milliseconds(waits: Sequence[float]) -> dict[str, float]:
    values = np.array(waits) * 1e3
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return {"p50": round(p50, 3), "p99": round(p99, 3), "max": round(values.max(), 3)}


def checked(audit: Audit) -> dict[str, int]:
    assert not (audit.missing or audit.twice or audit.strange), audit
    return audit._asdict()


# Sampling while producers append


def report_sampling(folder: Path, size: Size) -> dict[str, Any]:
    loads = {"still": 0, "rest": 0, "usual": USUAL, "hard": HARD}
    turns: dict[str, list[Turn]] = {name: [] for name in loads}
    system = System(folder / "sampling")
    try:
        system.fill(size.fill)
        for _ in range(size.turns):
            for name, rate in loads.items():
                refresh = None if name == "still" else size.refresh
                turn = system.turn(rate=rate, seconds=size.seconds, refresh=refresh)
                turns[name].append(turn)
        audit = checked(system.close())
    finally:
        system.kill()
    rows = {name: _sampling_row(mine, turns) for name, mine in turns.items()}
    print(
        f"\nSampling: {LENGTH} steps, batch {BATCH}, {PRODUCERS} producers, a new view every "
        f"{size.refresh} updates (still: never), {size.turns} turns of {size.seconds:g} s"
    )
    print(
        "load    offered/s  windows/s  of still (quartiles)    of rest (quartiles)     "
        "by CPU  refresh ms  store CPU  ack p50 ms"
    )
    for name, row in rows.items():
        still, rest = (
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*row[key]) for key in ("of_still", "of_rest")
        )
        print(
            f"{name:7} {row['offered']:9.0f} {row['windows']:9.0f}  {still:22}  {rest:22}"
            f" {row['of_rest_by_cpu'][1]:7.2f} {row['refresh_ms']:11.1f}"
            f" {row['store_cpu']:9.1%} {row['ack_ms']['p50'] if row['ack_ms'] else 0:11.2f}"
        )
    return {"refresh": size.refresh, "loads": rows, "audit": audit}


def _sampling_row(mine: list[Turn], turns: dict[str, list[Turn]]) -> dict[str, Any]:
    waits = [wait for turn in mine for wait in turn.waits]
    return {
        "offered": float(np.mean([turn.offered for turn in mine])),
        "windows": float(np.median([turn.windows for turn in mine])),
        "of_still": ratios(mine, turns["still"], lambda turn: turn.windows),
        "of_rest": ratios(mine, turns["rest"], lambda turn: turn.windows),
        "of_rest_by_cpu": ratios(mine, turns["rest"], lambda turn: turn.windows_by_cpu),
        "refreshes": sum(turn.refreshes for turn in mine),
        "refresh_ms": 1e3 * float(np.median([turn.refresh_seconds for turn in mine])),
        "store_cpu": float(np.median([turn.store_cpu for turn in mine])),
        "producers_cpu": float(np.median([turn.producers_cpu for turn in mine])),
        "ack_ms": milliseconds(waits) if waits else None,
    }


# Appending


def report_appending(folder: Path, size: Size) -> dict[str, Any]:
    given, raw, rolls = parcels(), [], []
    bursts: dict[tuple[Mode, int], list[Burst]] = {
        (mode, producers): [] for producers in size.producers for mode in MODES
    }
    for turn in range(size.bursts):
        raw += raw_syncs(folder, size.syncs)
        rolls.append(roll_seconds(folder / f"roll-{turn}", size.rolled, given))
        for (mode, producers), mine in bursts.items():
            path = folder / f"{mode}-{producers}-{turn}"
            mine.append(burst(path, mode, producers, size.burst_seconds, given))
    rows = [_appending_row(mode, producers, mine) for (mode, producers), mine in bursts.items()]
    yardstick = milliseconds(raw)
    print(
        f"\nAppending: each producer waits for its answer; {size.bursts} turns of "
        f"{size.burst_seconds:g} s; one {BLOCK}-byte write + fdatasync: "
        + ", ".join(f"{name} {value:.2f} ms" for name, value in yardstick.items())
    )
    print(
        f"a roll of {size.rolled >> 20} MiB of log holds appends up for {np.median(rolls):.2f} s "
        f"({min(rolls):.2f} to {max(rolls):.2f})"
    )
    print("mode  producers  episodes/s  transitions/s   MB/s  group  ack ms: p50     p99     max")
    for row in rows:
        ack = row["ack_ms"]
        print(
            f"{row['mode']:5} {row['producers']:9} {row['episodes']:11.0f}"
            f" {row['transitions']:14.0f} {row['bytes'] / 1e6:6.1f} {row['group']:6.1f}"
            f" {ack['p50']:12.2f} {ack['p99']:7.2f} {ack['max']:7.1f}"
        )
    return {"raw_sync_ms": yardstick, "roll_seconds": quartiles(rolls), "rows": rows}


def _appending_row(mode: Mode, producers: int, bursts: list[Burst]) -> dict[str, Any]:
    def speed(amounts: list[int]) -> float:
        pairs = zip(amounts, bursts, strict=True)
        return float(np.median([amount / burst.seconds for amount, burst in pairs]))

    episodes = [burst.audit.episodes for burst in bursts]
    return {
        "mode": mode,
        "producers": producers,
        "episodes": speed(episodes),
        "transitions": speed([burst.audit.steps for burst in bursts]),
        "bytes": speed([burst.bytes for burst in bursts]),
        "group": sum(episodes) / sum(burst.groups for burst in bursts),
        "ack_ms": milliseconds([wait for burst in bursts for wait in burst.waits]),
        "audits": [checked(burst.audit) for burst in bursts],
    }


# All protections


def report_protections(folder: Path, size: Size) -> dict[str, Any]:
    systems = {
        name: System(folder / f"protections-{name}", protected=name == "on")
        for name in ("on", "off")
    }
    turns: dict[str, list[Turn]] = {name: [] for name in systems}
    try:
        for system in systems.values():
            system.fill(size.fill)
        for pair in range(size.pairs):
            names = list(systems)[:: -1 if pair % 2 else 1]  # neither always comes first
            for name in names:
                turn = systems[name].turn(rate=HARD, seconds=size.seconds, refresh=size.refresh)
                turns[name].append(turn)
        audits = {name: checked(system.close()) for name, system in systems.items()}
    finally:
        for system in systems.values():
            system.kill()
    results: dict[str, Any] = {
        "on_of_off": ratios(turns["on"], turns["off"], lambda turn: turn.windows),
        "on_of_off_by_cpu": ratios(turns["on"], turns["off"], lambda turn: turn.windows_by_cpu),
        "on": _sampling_row(turns["on"], {"still": turns["on"], "rest": turns["on"]}),
        "off": _sampling_row(turns["off"], {"still": turns["off"], "rest": turns["off"]}),
        "audits": audits,
    }
    print(
        f"\nProtections: {HARD} transitions/s offered, {size.pairs} pairs of turns of "
        f"{size.seconds:g} s, a new view every {size.refresh} updates"
    )
    print("protections  offered/s  windows/s  refresh ms  store CPU  ack ms: p50     p99")
    for name in systems:
        row = results[name]
        print(
            f"{name:11} {row['offered']:10.0f} {row['windows']:9.0f} {row['refresh_ms']:11.1f}"
            f" {row['store_cpu']:10.1%} {row['ack_ms']['p50']:12.2f} {row['ack_ms']['p99']:7.2f}"
        )
    for name, unit in (("on_of_off", "windows a second"), ("on_of_off_by_cpu", "by CPU time")):
        low, middle, high = results[name]
        print(f"on/off, {unit}: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    return results


if __name__ == "__main__":
    main()
