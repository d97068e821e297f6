"""Whole episodes of one policy on all cores, the same whatever the number of cores."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from actors.collect import Policy, episode_streams, rollout
from m3pc.types import Episode

BLOCK = 4  # episodes a task
_worker: dict[str, Any] = {}  # a worker process's environment and policy


def collect(
    env_id: str,
    policy: Policy,
    *,
    steps: int,
    seed: int,
    version: int = -1,
    workers: int | None = None,
) -> Iterator[Episode]:
    """Episodes 0, 1, 2, ... in order, up to and with the one that completes `steps`.

    Episode k depends on (seed, k) only, so who rolls it out, and beside what, does not matter.
    """
    workers = workers or len(os.sched_getaffinity(0))
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (env_id, policy, seed, version)) as pool:
        queue: deque[Future[list[Episode]]] = deque()
        block = collected = 0
        try:
            while collected < steps:
                while len(queue) < 2 * workers:
                    queue.append(pool.submit(_block, block))
                    block += 1
                for episode in queue.popleft().result():
                    yield episode
                    collected += len(episode)
                    if collected >= steps:
                        break
        finally:
            pool.shutdown(cancel_futures=True)


def _start(env_id: str, policy: Policy, seed: int, version: int) -> None:
    import m3pc.envs

    _worker.update(env=m3pc.envs.make(env_id), policy=policy, seed=seed, version=version)


def _block(number: int) -> list[Episode]:
    return [_episode(number * BLOCK + i) for i in range(BLOCK)]


def _episode(number: int) -> Episode:
    seed, rng = episode_streams(_worker["seed"], number)
    return rollout(
        _worker["env"], _worker["policy"], seed=seed, rng=rng, version=_worker["version"]
    )
