"""What every reader of imported data returns: sizes and origin, and an iterator of episodes."""

from collections.abc import Iterator
from dataclasses import dataclass

from m3pc.types import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the user states about a file, in place of what the file says."""

    keys: tuple[str, ...] = ()  # observations to concatenate to a state, in this order
    max_episode_steps: int | None = None  # H, the environment's step limit
    env: str | None = None  # the environment's name
    subset: str = ""  # name of one of robomimic's masks; empty: all episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSource:
    """A dataset that is being read."""

    kind: str  # d4rl, robomimic, minari
    state_size: int  # S
    action_size: int  # A
    max_episode_steps: int  # H
    env: str | None  # the environment's name, if it is known
    details: dict[str, object]  # provenance, stored as JSON with the data
    episodes: Iterator[Episode]
