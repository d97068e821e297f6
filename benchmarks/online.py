"""How fast a run collects, what the planner server gains, and what each process waits for.

    python -m benchmarks.online [--quick] [--json FILE]

Preset small's network (64 candidates) on d4rl/Hopper-v2, in the real processes on a private Ray
cluster; the server also with a network as wide as the paper's. Variants are measured in turns, so
that noise of the machine disturbs them alike; a ratio is the median over the rounds, with its
quartiles. Prints Markdown. Linux only: processor times come from /proc.
"""

import argparse
import json
import os
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m3pc.ray_nodes.connection import connected, prepare_environment

prepare_environment(None)  # before anything loads Ray

import torch  # noqa: E402

from benchmarks.collecting import Rounds, report_actors, report_ways  # noqa: E402
from benchmarks.planner_throughput import report_served  # noqa: E402
from benchmarks.rollout_system import Shape, System  # noqa: E402
from benchmarks.time_shares import report_shares  # noqa: E402
from m3pc.cli.options import open_store  # noqa: E402
from m3pc.config.overrides import replace  # noqa: E402
from m3pc.config.presets import PRESETS  # noqa: E402
from m3pc.config.schema import Mode  # noqa: E402
from m3pc.distributed.endpoints import NAMESPACE  # noqa: E402
from m3pc.training import pretrain  # noqa: E402
from replay.store.store import Store  # noqa: E402

DATA = "shipped:hopper-medium-replay"
MODES: tuple[Mode, ...] = ("rcbc", "m")
FEW, MANY = Shape(actors=2, envs=8), Shape(actors=2, envs=32)  # 16 in all, 16 in a call
WIDE = 512  # the paper's width
CPUS = 8  # logical ones, of the Ray cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    pretrain: int = 200  # updates of the model, and of the critic
    rounds: int = 4
    warm: float = 0.7  # seconds
    seconds: float = 2.0  # of a turn
    actors: tuple[int, ...] = (1, 2, 4, 8)
    envs: int = 4  # of each of these actors
    ways: tuple[tuple[Shape, tuple[Mode, ...]], ...] = ((FEW, MODES), (MANY, ("rcbc",)))
    batches: tuple[tuple[int, int], ...] = (
        (16, 8),
        (16, 16),
        (64, 16),
    )  # environments in all, in one request
    wide_batches: tuple[tuple[int, int], ...] = ((16, 8), (64, 16))
    served_rounds: int = 6
    served_seconds: float = 1.0
    run_seconds: float = 30.0


QUICK = Size(
    pretrain=1,
    rounds=1,
    warm=0.1,
    seconds=0.4,
    actors=(1, 2),
    ways=((FEW, MODES),),
    batches=((16, 8),),
    wide_batches=((16, 8),),
    served_rounds=2,
    served_seconds=0.2,
    run_seconds=3.0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a check in about a minute")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    torch.set_num_threads(1)
    machine: dict[str, Any] = {"cores": os.cpu_count(), "torch": torch.__version__}
    machine |= {"threads": torch.get_num_threads(), "load": [os.getloadavg()[0]]}
    print(
        f"{machine['cores']} cores, torch {machine['torch']} with {machine['threads']} thread(s) a "
        f"process, load {machine['load'][0]:.1f} at the start"
    )
    with tempfile.TemporaryDirectory() as name, connected(namespace=NAMESPACE, cpus=CPUS):
        results = measure(Path(name), size)
    machine["load"].append(os.getloadavg()[0])
    print(f"\nload {machine['load'][1]:.1f} at the end")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "size": asdict(size), **results}))


def measure(folder: Path, size: Size) -> dict[str, Any]:
    """All measurements, in the current Ray session."""
    data = open_store(DATA)
    source = pretrained(folder / "pretrained", data, size.pretrain)
    rounds = Rounds(count=size.rounds, warm=size.warm, seconds=size.seconds)
    (folder / "collecting").mkdir()
    with closing(System(folder / "collecting", source)) as system:
        results: dict[str, Any] = {
            "actors": report_actors(system, rounds, MODES, size.actors, size.envs),
            "ways": [
                row
                for shape, modes in size.ways
                for row in report_ways(system, rounds, modes, shape, source)
            ],
            "served": [
                row
                for weights, modes, batches in (
                    (source, MODES, size.batches),
                    (untrained(folder / "wide", data, WIDE), ("rcbc",), size.wide_batches),
                )
                for row in report_served(
                    system,
                    weights,
                    modes,
                    batches,
                    rounds=size.served_rounds,
                    seconds=size.served_seconds,
                )
            ],
        }
    return results | {"shares": report_shares(folder / "run", source, data, size.run_seconds)}


def pretrained(path: Path, data: Store, updates: int) -> Path:
    settings = {
        "pretrain.updates": updates,
        "pretrain.warmup": min(updates, 20),
        "critic.regression_updates": updates,
        "critic.updates": updates,
    }
    pretrain.create_run(data, replace(PRESETS["small"], settings), path)
    pretrain.resume(path, lambda numbers: None)
    return path


def untrained(path: Path, data: Store, width: int) -> Path:
    pretrain.create_run(data, replace(PRESETS["small"], {"model.width": width}), path)
    return path


if __name__ == "__main__":
    main()
