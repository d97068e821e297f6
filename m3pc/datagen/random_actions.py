"""Make a data set without any skill: what a body does when it is moved at random."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import m3pc.envs
from m3pc.datagen.collect import header_of, played
from m3pc.datagen.policies.random_hold import RandomHoldSchedule
from replay.store.store import Store, write_store

QUALITY = "babble"
STEPS = 200_000  # where no number is given
HELD = 0.5  # seconds that actions are held in an episode, on average, at most
RATE = 50.0  # steps a second, where an environment does not say


def babble(
    env_id: str,
    out: Path,
    *,
    steps: int,
    strongest: float,
    seed: int,
    on_progress: Callable[[dict[str, Any]], None],
    workers: int | None = None,
) -> Store:
    """Episodes of random actions, up to and with the one that completes `steps`."""
    about = {"kind": "made", "quality": QUALITY, "algorithm": "babbling"}
    header = header_of(env_id, about | {"seed": seed, "steps": steps})
    with m3pc.envs.make(env_id) as env:
        longest = max(HELD * float(env.metadata.get("render_fps") or RATE), 1.0)
    cast = RandomHoldSchedule(actions=header.actions, longest=longest, strongest=strongest)
    header = header.model_copy(update={"source": header.source | cast.numbers()})
    with write_store(out, header) as writer:
        for episode in played(env_id, cast, steps=steps, seed=seed, workers=workers):
            writer.append(episode)
            on_progress({"steps": writer.steps, "of": steps, "episodes": writer.episodes})
    return Store(out)
