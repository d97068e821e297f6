"""How the processes of a run find each other."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from m3pc.coordinator import connect
from m3pc.online.recovery import recover_from_disk
from m3pc.types import Coordinator

GENERATIONS, COORDINATOR = "generations", "coordinator.sqlite"  # in the run's folder
NAMESPACE = "m3pc"  # Ray namespace of all processes
NodeRole = Literal["actor", "planner", "learner"]
ROLE_UNITS = 0.001  # each process takes so little of a role resource: it only selects nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEndpoints:
    """Names and addresses of one run. Every process gets a pickled copy."""

    run: Path  # a folder that all machines see
    id: str  # id of the run
    coordinator: str  # address, or "" for a file in the run's folder
    roles: bool = False  # whether processes run only on nodes that offer their role

    def name(self, part: str, number: int = 0) -> str:
        """The name of a process in Ray, unique among all runs of a cluster."""
        return f"{self.id}-{part}-{number}"

    def resources(self, role: NodeRole) -> dict[str, float]:
        """Resources to request from Ray, so that a process runs on a node of its role."""
        return {f"m3pc_{role}": ROLE_UNITS} if self.roles else {}

    def connect(self) -> Coordinator:
        return connect(
            self.coordinator or self.run / COORDINATOR,
            run=self.id,
            generations=self.run / GENERATIONS,
            recover=partial(recover_from_disk, self.run),
        )
