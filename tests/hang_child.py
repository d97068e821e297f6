"""A rollout process of which one environment never comes back, at last when it is closed after
the end. It ends itself.
"""

import logging
import sys
import time
from functools import partial
from pathlib import Path

from actors.collector import Collector, Order
from actors.watchdog import Watchdog
from actors.worker import Acting
from m3pc.coordinator import connect
from replay.payload import encode
from replay.writer import Writer
from tests.faulty_env import FAULTY
from tests.live_writer import HEADER, ROOMY
from tests.slow_planner import SlowPlanner

TIMEOUT = 1.0  # seconds


def main(folder: Path, hang: str) -> None:
    logging.basicConfig(level=logging.INFO)
    order = Order(
        env_id=FAULTY,
        seed=0,
        acting=Acting(window=8, horizon=4),
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
    collector = Collector(0, watches=partial(Watchdog, grace=1.0))
    collector.start(order)
    if hang == "end":
        while not collector.report().finished:
            time.sleep(0.01)
        logging.info("event=drained left=%d", collector.drain(0.5))
    time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
