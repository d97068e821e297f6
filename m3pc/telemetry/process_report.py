"""What a supervised process of a run answers when its supervisor polls it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from m3pc.telemetry.recorder import Snapshot

DetailT = TypeVar("DetailT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport(Generic[DetailT]):
    pid: int
    snapshot: Snapshot  # of its metrics
    detail: DetailT  # what only this kind of process has to say
