"""What every reader of foreign data gives: sizes and origin first, then episodes one by one."""

from collections.abc import Iterator
from dataclasses import dataclass

from m3pc.types import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the user may say about a file that it does not say itself."""

    keys: tuple[str, ...] = ()  # observations to join, in this order
    max_episode_steps: int | None = None  # H, the environment's step limit
    env: str | None = None
    subset: str = ""  # one of robomimic's masks; all episodes without


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSource:
    kind: str  # d4rl, robomimic, minari
    states: int  # S
    actions: int  # A
    max_episode_steps: int  # H
    env: str | None
    details: dict[str, object]  # anything else worth keeping with the data
    episodes: Iterator[Episode]
