"""A rollout process in which one environment hangs: in a step, or when it is closed at the end.

The process ends itself.
"""

import logging
import sys
import time
from functools import partial
from pathlib import Path

from actors.rollout_loop import ExplorationConfig
from actors.rollout_worker import RolloutConfig, RolloutWorker
from actors.watchdog import EnvWatchdog
from m3pc.coordinator import connect
from replay.format.payload import encode
from replay.writing.writer import Writer
from tests.support.envs.faulty_env import FAULTY
from tests.support.fakes.slow_planner import SlowPlanner
from tests.support.faults.live_writer import HEADER, ROOMY

TIMEOUT = 1.0  # seconds


def main(folder: Path, hang: str) -> None:
    logging.basicConfig(level=logging.INFO)
    config = RolloutConfig(
        env_id=FAULTY,
        seed=0,
        exploration=ExplorationConfig(),
        planner=SlowPlanner(),
        sink=Writer(folder / "store", HEADER, ROOMY),
        encode=encode,
        connect=partial(
            connect, folder / "coordinator.sqlite", run="hang", generations=folder / "generations"
        ),
        env_kwargs={
            "hang": "close" if hang == "end" else hang,
            "at": -1 if hang == "end" else 3,
            "only_env": 0,
        },
        envs=4,
        step_timeout=TIMEOUT,
    )
    worker = RolloutWorker(0, make_watchdog=partial(EnvWatchdog, grace=1.0))
    worker.start(config)
    if hang == "end":
        while not worker.report().detail.finished:
            time.sleep(0.01)
        logging.info("event=drained left=%d", worker.drain(0.5))
    time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
