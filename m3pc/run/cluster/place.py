"""Where the processes of a run meet. Small and picklable: every process gets one."""

from dataclasses import dataclass
from pathlib import Path

from m3pc.coordinator import connect
from m3pc.run.online.floor import disk_floor
from m3pc.types import Coordinator, Floor

GENERATIONS, COORDINATOR = "generations", "coordinator.sqlite"  # in the run's folder
NAMESPACE = "m3pc"  # of Ray


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    run: Path  # a folder that all machines see
    id: str  # of the run
    coordinator: str  # address, or "" for a file in the run's folder

    def name(self, part: str, number: int = 0) -> str:
        """Of a process, in Ray: no other run has it."""
        return f"{self.id}-{part}-{number}"

    def connect(self) -> Coordinator:
        return connect(
            self.coordinator or self.run / COORDINATOR,
            run=self.id,
            generations=self.run / GENERATIONS,
            floor=self.floor,
        )

    def floor(self) -> Floor:
        return disk_floor(self.run)
