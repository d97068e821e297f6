"""Collects complete episodes on all cores; the result does not depend on their number."""

import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import m3pc.envs
from actors.single_env import EpisodeSchedule, play
from m3pc.types import Episode
from replay.format.manifest import Header

BLOCK = 4  # episodes per task
_worker: dict[str, Any] = {}  # in a worker process: the environment, and the arguments of `play`


def header_of(env_id: str, source: dict[str, Any]) -> Header:
    """Header of a data set that is collected here: sizes of the environment, `source`, engine."""
    with m3pc.envs.make(env_id) as env:
        states, actions = m3pc.envs.env_sizes(env)
        return Header(
            states=states,
            actions=actions,
            max_episode_steps=m3pc.envs.step_limit(env),
            env=env_id,
            source=source | {"engine": m3pc.envs.engine(env)},
        )


def collect(
    env_id: str,
    schedule: EpisodeSchedule,
    *,
    seed: int,
    steps: float = math.inf,
    episodes: float = math.inf,
    version: int = -1,
    workers: int | None = None,
) -> Iterator[Episode]:
    """Yield episodes 0, 1, 2, ... in order, until `steps` or `episodes` is reached.

    The last round of the schedule is completed. Episode k depends on (seed, k) only, so it does
    not matter which process plays it.
    """
    assert steps < math.inf or episodes < math.inf, "a collection needs an end"
    workers = workers or len(os.sched_getaffinity(0))
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (env_id, schedule, seed, version)) as pool:
        blocks: deque[Future[list[Episode]]] = deque()
        collected = number = submitted = 0
        max_episodes = episodes + schedule.episodes_per_round - 1  # a started round is completed
        try:
            while True:
                while len(blocks) < 2 * workers and submitted < max_episodes:
                    block = range(submitted, int(min(submitted + BLOCK, max_episodes)))
                    blocks.append(pool.submit(_block, block))
                    submitted = block.stop
                for episode in blocks.popleft().result():
                    yield episode
                    number += 1
                    collected += len(episode)
                    reached = collected >= steps or number >= episodes
                    if reached and number % schedule.episodes_per_round == 0:
                        return
        finally:
            pool.shutdown(cancel_futures=True)


def _start(env_id: str, schedule: EpisodeSchedule, seed: int, version: int) -> None:
    arguments = {"schedule": schedule, "seed": seed, "version": version}
    _worker.update(env=m3pc.envs.make(env_id), arguments=arguments)


def _block(numbers: range) -> list[Episode]:
    return [play(_worker["env"], number=number, **_worker["arguments"]) for number in numbers]
