"""Environment steps a second, by the number of actors and by which planner they ask."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rollout_system import Shape, System, Turn, Way
from benchmarks.tables import judge, ratios, shown, table
from benchmarks.topologies import EachAlone, Inside
from m3pc.config.schema import Mode

SERVER, SECOND, NO_BATCHES = "server", "second", "no-batches"  # names of planner servers
OTHERS = ("a call for each", "in the actor")  # ways to compare with
HOW = {"": "steps", ", by CPU": "steps_by_cpu"}
RCBC_AIM, PLANNED_AIM = 4.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    count: int
    warm: float  # seconds, before each turn
    seconds: float  # of a turn

    def turns(
        self, system: System, cells: Mapping[str, tuple[Way, Shape]], modes: Sequence[Mode]
    ) -> dict[tuple[Mode, str], list[Turn]]:
        """`count` turns of each cell in each mode, interleaved."""
        turns: dict[tuple[Mode, str], list[Turn]] = {
            (mode, name): [] for mode in modes for name in cells
        }
        for _ in range(self.count):
            for (mode, name), samples in turns.items():
                way, shape = cells[name]
                samples.append(system.turn(way, mode, shape, warm=self.warm, seconds=self.seconds))
        return turns


def report_actors(
    system: System, rounds: Rounds, modes: Sequence[Mode], counts: Sequence[int], envs: int
) -> list[dict[str, Any]]:
    way = served_by(system, system.serve(SERVER))
    cells = {str(count): (way, Shape(count, envs)) for count in counts}
    turns, first = rounds.turns(system, cells, modes), str(counts[0])
    rows: list[dict[str, Any]] = [
        {
            "mode": mode,
            "actors": count,
            **medians(samples),
            "of_first": ratios(column(samples, "steps"), column(turns[mode, first], "steps")),
        }
        for (mode, count), samples in turns.items()
    ]
    print(
        f"\n### Actors\n\n{envs} environments each, one planner server; {rounds.count} rounds of "
        f"turns of {rounds.seconds:g} s.\n"
    )
    shares = {"actor steps": "stepping", "actor waits": "blocked", "planner computes": "busy"}
    table(
        ["mode", "actors", "steps/s", "decisions/s", f"of {first}", "rows a batch", *shares],
        [
            [
                *(row["mode"], row["actors"], f"{row['steps']:.0f}", f"{row['decisions']:.0f}"),
                *(shown(row["of_first"]), f"{row['batch']:.1f}"),
                *(f"{row[name]:.0%}" for name in shares.values()),
            ]
            for row in rows
        ],
    )
    return rows


def report_ways(
    system: System, rounds: Rounds, modes: Sequence[Mode], shape: Shape, source: Path
) -> list[dict[str, Any]]:
    first, second = system.serve(SERVER), system.serve(SECOND)
    each = system.serve(NO_BATCHES, {"fleet.batch": 1})
    sizes = system.client([each], 0)
    inside = Inside(str(source), sizes.window, sizes.horizon)
    ways = {
        "one server": served_by(system, first),
        "two servers": served_by(system, first, second),
        OTHERS[0]: Way(
            planners=(each,), planner_of=lambda slot: EachAlone(system.client([each], slot))
        ),
        OTHERS[1]: Way(planners=(), planner_of=lambda slot: inside),
    }
    turns = rounds.turns(system, {name: (way, shape) for name, way in ways.items()}, modes)
    rows: list[dict[str, Any]] = [
        {"mode": mode, "way": name, **shape._asdict(), **medians(samples)}
        | {
            f"of {other}{how}": ratios(column(samples, key), column(turns[mode, other], key))
            for other in OTHERS
            for how, key in HOW.items()
        }
        for (mode, name), samples in turns.items()
    ]
    print(
        f"\n### Ways to ask for an action, {shape.envs // 2} environments a call\n\n"
        f"{shape.actors} actors with {shape.envs} environments each; {rounds.count} rounds of "
        f"turns of {rounds.seconds:g} s. By CPU: steps per second of processor time of all actors "
        "and planners.\n"
    )
    compared = [f"of {other}{how}" for other in OTHERS for how in HOW]
    table(
        ["mode", "way", "steps/s", *compared, "rows a batch", "planner computes"],
        [
            [
                *(row["mode"], row["way"], f"{row['steps']:.0f}"),
                *(shown(row[name]) for name in compared),
                *(f"{row['batch']:.1f}", f"{row['busy']:.0%}"),
            ]
            for row in rows
        ],
    )
    _judge(rows)
    return rows


def served_by(system: System, *names: str) -> Way:
    return Way(planners=names, planner_of=partial(system.client, names))


def column(turns: Sequence[Turn], name: str) -> list[float]:
    return [float(getattr(turn, name)) for turn in turns]


def medians(turns: Sequence[Turn]) -> dict[str, float]:
    return {name: float(np.median(column(turns, name))) for name in asdict(turns[0])}


def _judge(rows: Sequence[Mapping[str, Any]]) -> None:
    print()
    for row in rows:
        if row["way"] not in OTHERS:
            plain = row["mode"] == "rcbc"
            for other in OTHERS[:1] if plain else OTHERS:
                what = f"{row['mode']}, {row['envs'] // 2} a call, {row['way']} over {other}"
                judge(what, row[f"of {other}"][1], RCBC_AIM if plain else PLANNED_AIM)
