"""Whole episodes of one policy on all cores, the same whatever the number of cores."""

import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import m3pc.envs
from actors.single_env import ActionFn, EpisodeSchedule, SinglePolicy, play
from m3pc.types import Episode
from replay.format.manifest import Header

BLOCK = 4  # episodes a task
_worker: dict[str, Any] = {}  # a worker process's environment and cast


def header_of(env_id: str, source: dict[str, Any]) -> Header:
    """Of a set that is rolled out here: the environment's sizes, and the engine beside `source`."""
    with m3pc.envs.make(env_id) as env:
        assert env.observation_space.shape and env.action_space.shape
        return Header(
            states=env.observation_space.shape[0],
            actions=env.action_space.shape[0],
            max_episode_steps=m3pc.envs.step_limit(env),
            env=env_id,
            source=source | {"engine": m3pc.envs.engine(env)},
        )


def collect(
    env_id: str,
    policy: ActionFn,
    *,
    steps: int,
    seed: int,
    version: int = -1,
    workers: int | None = None,
) -> Iterator[Episode]:
    """Episodes of one policy, up to and with the one that completes `steps`."""
    cast = SinglePolicy(policy)
    return played(env_id, cast, steps=steps, seed=seed, version=version, workers=workers)


def played(
    env_id: str,
    cast: EpisodeSchedule,
    *,
    seed: int,
    steps: float = math.inf,
    episodes: float = math.inf,
    version: int = -1,
    workers: int | None = None,
) -> Iterator[Episode]:
    """Episodes 0, 1, 2, ... in order, up to and with the round that completes one of the numbers.

    Episode k depends on (seed, k) only, so who rolls it out, and beside what, does not matter.
    """
    assert steps < math.inf or episodes < math.inf, "a collection needs an end"
    workers = workers or len(os.sched_getaffinity(0))
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (env_id, cast, seed, version)) as pool:
        queue: deque[Future[list[Episode]]] = deque()
        collected = number = asked = 0
        last = episodes + cast.round - 1  # a round that was begun is played to its end
        try:
            while True:
                while len(queue) < 2 * workers and asked < last:
                    block = range(asked, int(min(asked + BLOCK, last)))
                    queue.append(pool.submit(_block, block))
                    asked = block.stop
                for episode in queue.popleft().result():
                    yield episode
                    number += 1
                    collected += len(episode)
                    enough = collected >= steps or number >= episodes
                    if enough and number % cast.round == 0:
                        return
        finally:
            pool.shutdown(cancel_futures=True)


def _start(env_id: str, cast: EpisodeSchedule, seed: int, version: int) -> None:
    _worker.update(env=m3pc.envs.make(env_id), cast=cast, seed=seed, version=version)


def _block(numbers: range) -> list[Episode]:
    return [_episode(number) for number in numbers]


def _episode(number: int) -> Episode:
    return play(
        _worker["env"],
        _worker["cast"],
        seed=_worker["seed"],
        number=number,
        version=_worker["version"],
    )
