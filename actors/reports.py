"""What a rollout process reports about itself. Loads no numpy: idle processes report, too."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from m3pc.types import Episode

RolloutState = Literal["idle", "running", "draining", "ended", "failed"]
EpisodeOutcome = Literal["terminated", "truncated", "aborted"]


class FinishedEpisode(NamedTuple):
    """An episode that ended. Numbers go up by 1, so a supervisor that polls often misses none."""

    number: int  # counts from 0 in each incarnation
    outcome: EpisodeOutcome
    total: float  # sum of rewards
    length: int
    version: int  # `Version.packed` at its first step
    steps: int  # taken by all environments of the incarnation until its end
    planned: float = math.nan  # return that planning expected at its first step, or NaN
    realised: float = math.nan  # actual return, discounted as in the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """The `detail` of a rollout process in its ProcessReport."""

    state: RolloutState
    slot: int
    reason: str = ""  # why it ended or failed
    incarnation: int = -1  # -1 before it is registered
    unacked: int = 0  # episodes that the store has not acknowledged
    finished: tuple[FinishedEpisode, ...] = ()


def outcome(episode: "Episode") -> EpisodeOutcome:
    """How the episode ended."""
    if episode.terminated:
        return "terminated"
    return "truncated" if episode.truncated else "aborted"
