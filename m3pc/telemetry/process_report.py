"""The answer of a supervised process to its supervisor's poll."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from m3pc.telemetry.recorder import Snapshot

DetailT = TypeVar("DetailT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport(Generic[DetailT]):
    pid: int
    snapshot: Snapshot  # the process's metrics
    detail: DetailT  # status that is specific to the kind of process
