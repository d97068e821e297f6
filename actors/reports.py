"""What a rollout process tells about itself. Loads no numpy: it is said before any work begins."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from m3pc.telemetry.recorder import Snapshot

if TYPE_CHECKING:
    from m3pc.types import Episode

RolloutState = Literal["idle", "running", "draining", "ended", "failed"]
EpisodeOutcome = Literal["terminated", "truncated", "aborted"]


class FinishedEpisode(NamedTuple):
    """An episode that ended. Numbers go up by 1, so whoever asks often enough misses none."""

    number: int  # of this incarnation, from 0
    outcome: EpisodeOutcome
    total: float  # of its rewards
    length: int
    version: int  # `Version.packed` at its first step
    steps: int  # of all environments of this incarnation, when it ended
    planned: float = math.nan  # what planning expected at its first step; NaN without planning
    realised: float = math.nan  # what came of it, discounted as the plan was


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    state: RolloutState
    pid: int
    slot: int
    reason: str = ""  # why it ended or failed
    incarnation: int = -1  # -1 before it is registered
    unacked: int = 0  # episodes that the store has not acknowledged
    snapshot: Snapshot = field(default_factory=dict)
    finished: tuple[FinishedEpisode, ...] = ()


def outcome(episode: "Episode") -> EpisodeOutcome:
    if episode.terminated:
        return "terminated"
    return "truncated" if episode.truncated else "aborted"
