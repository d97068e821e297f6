"""Make a data set by script, where a policy that learns from nothing would learn nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from m3pc.core.env_ids import parted
from m3pc.core.manipulation_tasks import TASKS
from m3pc.datagen.collect import header_of, played
from m3pc.datagen.policies.scripted import CASTS, ScriptSchedule
from m3pc.plots import played_by_role
from m3pc.types import Episode, InputError
from replay.format.manifest import Header
from replay.store.store import Store, write_store

EPISODES = 200  # where no number is given


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedDataRequest:
    """What the user asked for."""

    env_id: str
    out: Path
    quality: str
    episodes: int | None = None
    steps: int | None = None
    noise: float | None = None  # None: each role's own; likewise
    strays: float | None = None
    seed: int
    picture: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTally:
    """What a role's episodes came to."""

    name: str
    lengths: Sequence[int]  # [K]
    successes: int  # of the K


def is_scripted(env_id: str, quality: str) -> bool:
    """Whether scripts make it; an InputError where the two do not go together."""
    plain, _ = parted(env_id)
    fitting = CASTS.get(plain, {})
    if quality in fitting:
        return True
    if fitting:
        raise InputError(
            f"quality is {quality!r}; for {plain}, which is played by script, give one of "
            f"{', '.join(fitting)}"
        )
    if plain in TASKS:
        raise InputError(
            f"there is no script for {plain}, and training would hardly ever see its reward; "
            "import robomimic's data instead: m3pc data import robomimic:square/ph OUT"
        )
    fit = [name for name, casts in CASTS.items() if quality in casts]
    if fit:
        raise InputError(
            f"quality {quality!r} is for {', '.join(fit)}, which are played by script; for {plain} "
            "give medium, medium-replay, expert or babble"
        )
    return False


def demonstrate(
    order: ScriptedDataRequest,
    on_progress: Callable[[dict[str, Any]], None],
    workers: int | None = None,
) -> tuple[Store, list[RoleTally]]:
    """The quality's roles play in turn, for so many episodes or steps, in whole rounds."""
    cast = CASTS[parted(order.env_id)[0]][order.quality]
    wanted = {"noise": order.noise, "strays": order.strays}
    given: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    cast = replace(cast, roles=tuple(replace(role, **given) for role in cast.roles))
    size = _size(order, cast)
    header = _header(order, cast, size)
    order.picture.parent.mkdir(parents=True, exist_ok=True)
    lengths: list[int] = []
    successes: list[bool] = []
    with write_store(order.out, header) as writer:
        for episode in played(order.env_id, cast, seed=order.seed, workers=workers, **size):
            writer.append(episode)
            lengths.append(len(episode))
            successes.append(succeeded(episode))
            on_progress(_numbers(size, sum(lengths), successes))
    tallies = tally(cast, lengths, successes)
    _draw(order, tallies)
    return Store(order.out), tallies


def succeeded(episode: Episode) -> bool:
    """The reward of these tasks is 1 at success, which ends the episode, and 0 before."""
    return episode.terminated and bool(episode.rewards[-1] > 0)


def tally(
    cast: ScriptSchedule, lengths: Sequence[int], successes: Sequence[bool]
) -> list[RoleTally]:
    roles = len(cast.roles)
    return [
        RoleTally(name=role.name, lengths=lengths[i::roles], successes=sum(successes[i::roles]))
        for i, role in enumerate(cast.roles)
    ]


def _size(order: ScriptedDataRequest, cast: ScriptSchedule) -> dict[str, int]:
    """One of episodes and steps."""
    if order.episodes and order.steps:
        raise InputError(
            f"--episodes {order.episodes} and --steps {order.steps} were given; give one of them"
        )
    if order.steps:
        return {"steps": order.steps}
    episodes = order.episodes or EPISODES
    if episodes % cast.round:
        raise InputError(
            f"{episodes} episodes were asked for; {order.quality!r} plays {cast.round} from every "
            f"initial state: give a multiple of {cast.round}"
        )
    return {"episodes": episodes}


def _header(order: ScriptedDataRequest, cast: ScriptSchedule, size: dict[str, int]) -> Header:
    source = {
        "kind": "made",
        "quality": order.quality,
        "algorithm": "scripted",
        "roles": [role.numbers() for role in cast.roles],
        "share": round(1 / len(cast.roles), 4),  # of each role
        "same_starts": cast.together,
        "seed": order.seed,
        **size,
    }
    return header_of(order.env_id, source)


def _numbers(size: dict[str, int], steps: int, successes: Sequence[bool]) -> dict[str, Any]:
    """What is counted, of how many, first."""
    done = {"steps": steps, "episodes": len(successes)}
    ((unit, wanted),) = size.items()
    return {unit: done[unit], "of": wanted, **done, "success": sum(successes) / len(successes)}


def _draw(order: ScriptedDataRequest, tallies: Sequence[RoleTally]) -> None:
    episodes = sum(len(role.lengths) for role in tallies)
    share = sum(role.successes for role in tallies) / episodes
    played_by_role(
        order.picture,
        {role.name: (np.asarray(role.lengths), role.successes) for role in tallies if role.lengths},
        title=f"{order.env_id}, {order.quality}: {episodes} episodes, {share:.0%} succeed",
    )
