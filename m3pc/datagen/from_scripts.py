"""`m3pc data make` for Lift and PickPlaceCan: scripted policies collect the data set.

A policy trained from nothing would hardly ever see the reward of these tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from m3pc.core.env_ids import split_env_name
from m3pc.core.manipulation_tasks import TASKS
from m3pc.core.progress import OnProgress
from m3pc.datagen.collect import collect, header_of
from m3pc.datagen.policies.scripted import SCHEDULES, ScriptSchedule
from m3pc.plots import outcomes_by_variant
from m3pc.types import Episode, InputError
from replay.store.store import Store, write_store

EPISODES = 200  # default size


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedDataRequest:
    """The options of the command."""

    env_id: str
    out: Path
    quality: str
    episodes: int | None = None
    steps: int | None = None
    noise: float | None = None  # None: each variant's own
    path_noise: float | None = None  # None: each variant's own
    seed: int
    picture: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantTally:
    """Results of the K episodes that one variant of a script played."""

    name: str
    lengths: Sequence[int]  # [K]
    successes: int


def is_scripted(env_id: str, quality: str) -> bool:
    """Whether scripts collect this data set. Raises InputError if no command can make it."""
    plain, _ = split_env_name(env_id)
    schedules = SCHEDULES.get(plain, {})
    if quality in schedules:
        return True
    if schedules:
        raise InputError(
            f"quality is {quality!r}; for {plain}, which is played by script, give one of "
            f"{', '.join(schedules)}"
        )
    if plain in TASKS:
        raise InputError(
            f"there is no script for {plain}, and training would hardly ever see its reward; "
            "import robomimic's data instead: m3pc data import robomimic:square/ph OUT"
        )
    envs = [name for name, by_quality in SCHEDULES.items() if quality in by_quality]
    if envs:
        raise InputError(
            f"quality {quality!r} is for {', '.join(envs)}, which are played by script; for "
            f"{plain} give medium, medium-replay, expert or babble"
        )
    return False


def make_scripted_dataset(
    request: ScriptedDataRequest,
    on_progress: OnProgress,
    workers: int | None = None,
) -> tuple[Store, list[VariantTally]]:
    """Store episodes of the quality's variants in turn, in complete rounds; draw the picture."""
    schedule = SCHEDULES[split_env_name(request.env_id)[0]][request.quality]
    options = {"noise": request.noise, "path_noise": request.path_noise}
    changes: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    schedule = replace(
        schedule, variants=tuple(replace(variant, **changes) for variant in schedule.variants)
    )
    size = _size(request, schedule)
    source = {
        "kind": "made",
        "quality": request.quality,
        "algorithm": "scripted",
        "roles": [variant.metadata() for variant in schedule.variants],
        "share": round(1 / len(schedule.variants), 4),  # per variant
        "same_starts": schedule.same_starts,
        "seed": request.seed,
        **size,
    }
    header = header_of(request.env_id, source)
    request.picture.parent.mkdir(parents=True, exist_ok=True)
    lengths: list[int] = []
    successes: list[bool] = []
    with write_store(request.out, header) as writer:
        episodes = collect(request.env_id, schedule, seed=request.seed, workers=workers, **size)
        for episode in episodes:
            writer.append(episode)
            lengths.append(len(episode))
            successes.append(succeeded(episode))
            on_progress(_progress(size, sum(lengths), successes))
    tallies = tally(schedule, lengths, successes)
    outcomes_by_variant(
        request.picture,
        {t.name: (np.asarray(t.lengths), t.successes) for t in tallies if t.lengths},
        title=f"{request.env_id}, {request.quality}: {len(lengths)} episodes, "
        f"{sum(successes) / len(successes):.0%} succeed",
    )
    return Store(request.out), tallies


def succeeded(episode: Episode) -> bool:
    """These tasks reward the step of success with 1 and end the episode; other steps get 0."""
    return episode.terminated and bool(episode.rewards[-1] > 0)


def tally(
    schedule: ScriptSchedule, lengths: Sequence[int], successes: Sequence[bool]
) -> list[VariantTally]:
    """Lengths and successes of all episodes, by the variant that played them."""
    count = len(schedule.variants)
    return [
        VariantTally(
            name=variant.name, lengths=lengths[i::count], successes=sum(successes[i::count])
        )
        for i, variant in enumerate(schedule.variants)
    ]


def _size(request: ScriptedDataRequest, schedule: ScriptSchedule) -> dict[str, int]:
    """The size of the data set: either {"episodes": count} or {"steps": count}."""
    if request.episodes and request.steps:
        raise InputError(
            f"--episodes {request.episodes} and --steps {request.steps} were given; give one of "
            "them"
        )
    if request.steps:
        return {"steps": request.steps}
    episodes = request.episodes or EPISODES
    per_round = schedule.episodes_per_round
    if episodes % per_round:
        raise InputError(
            f"{episodes} episodes were asked for; {request.quality!r} plays {per_round} from every "
            f"initial state: give a multiple of {per_round}"
        )
    return {"episodes": episodes}


def _progress(size: dict[str, int], steps: int, successes: Sequence[bool]) -> dict[str, Any]:
    """Numbers for OnProgress: the unit of `size` and its total come first."""
    done = {"steps": steps, "episodes": len(successes)}
    ((unit, total),) = size.items()
    return {unit: done[unit], "of": total, **done, "success": sum(successes) / len(successes)}
