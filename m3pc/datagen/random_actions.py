"""`m3pc data make --quality babble`: episodes of random actions, each held for some steps."""

from pathlib import Path

import m3pc.envs
from m3pc.core.progress import OnProgress
from m3pc.datagen.collect import collect, header_of
from m3pc.datagen.policies.random_hold import RandomHoldSchedule
from replay.store.store import Store, write_store

QUALITY = "babble"
STEPS = 200_000  # default size
MAX_HOLD = 0.5  # seconds: upper bound of an episode's mean hold time
DEFAULT_RATE = 50.0  # steps per second, where an environment states none


def make_random_dataset(
    env_id: str,
    out: Path,
    *,
    steps: int,
    max_strength: float,
    seed: int,
    on_progress: OnProgress,
    workers: int | None = None,
) -> Store:
    """Store episodes of random actions until `steps` is reached, the last one complete."""
    source = {"kind": "made", "quality": QUALITY, "algorithm": "babbling"}
    header = header_of(env_id, source | {"seed": seed, "steps": steps})
    with m3pc.envs.make(env_id) as env:
        max_hold = max(MAX_HOLD * float(env.metadata.get("render_fps") or DEFAULT_RATE), 1.0)
    schedule = RandomHoldSchedule(
        actions=header.actions, max_hold=max_hold, max_strength=max_strength
    )
    header = header.model_copy(update={"source": header.source | schedule.metadata()})
    with write_store(out, header) as writer:
        for episode in collect(env_id, schedule, steps=steps, seed=seed, workers=workers):
            writer.append(episode)
            on_progress({"steps": writer.steps, "of": steps, "episodes": writer.episodes})
    return Store(out)
