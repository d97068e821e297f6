"""Where the processes of a run meet. Small and picklable: every process gets one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m3pc.coordinator import connect
from m3pc.online.recovery import disk_floor
from m3pc.types import Coordinator, RecoveredState

GENERATIONS, COORDINATOR = "generations", "coordinator.sqlite"  # in the run's folder
NAMESPACE = "m3pc"  # of Ray
NodeRole = Literal["actor", "planner", "learner"]
ROLE_UNITS = 0.001  # of a node's resource: it tells where, and CPUs and GPUs tell how many


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEndpoints:
    run: Path  # a folder that all machines see
    id: str  # of the run
    coordinator: str  # address, or "" for a file in the run's folder
    roles: bool = False  # whether nodes say which parts of a run they are for

    def name(self, part: str, number: int = 0) -> str:
        """Of a process, in Ray: no other run has it."""
        return f"{self.id}-{part}-{number}"

    def resources(self, role: NodeRole) -> dict[str, float]:
        """What a process asks Ray for, so that it lands where it belongs."""
        return {f"m3pc_{role}": ROLE_UNITS} if self.roles else {}

    def connect(self) -> Coordinator:
        return connect(
            self.coordinator or self.run / COORDINATOR,
            run=self.id,
            generations=self.run / GENERATIONS,
            floor=self.floor,
        )

    def floor(self) -> RecoveredState:
        return disk_floor(self.run)
