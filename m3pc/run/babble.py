"""Make a data set without any skill: what a body does when it is moved at random."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.babble import Babble
from m3pc.run.collect import header_of, played
from replay.store import Store, write_store

QUALITY = "babble"
STEPS = 200_000  # where no number is given


def babble(
    env_id: str,
    out: Path,
    *,
    steps: int,
    seed: int,
    on_progress: Callable[[dict[str, Any]], None],
    workers: int | None = None,
) -> Store:
    """Episodes of random actions, up to and with the one that completes `steps`."""
    about = {"kind": "made", "quality": QUALITY, "algorithm": "babbling"}
    header = header_of(env_id, about | {"seed": seed, "steps": steps})
    cast = Babble(actions=header.actions)
    header = header.model_copy(update={"source": header.source | cast.numbers()})
    with write_store(out, header) as writer:
        for episode in played(env_id, cast, steps=steps, seed=seed, workers=workers):
            writer.append(episode)
            on_progress({"steps": writer.steps, "of": steps, "episodes": writer.episodes})
    return Store(out)
