"""The planner in its own process. Logic belongs in service.py.

Whoever looks it up by its name loads this class and all that it mentions: so no torch here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import ray

from m3pc.telemetry.recorder import Snapshot
from m3pc.types import Rejection
from planner.server.watchdog import LIMIT, batch_watchdog

if TYPE_CHECKING:
    from planner.server.service import PlannerService

# Threads by what they do: requests that wait never keep whoever looks after the run waiting. An
# actor has two requests on their way; with more actors than that, some wait before the batcher.
GROUPS = {"plans": 256, "reports": 4}


# Whoever drives the run restarts it. Ray's own annotations know no groups.
@cast(Any, ray.remote)(num_cpus=1, max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)
class PlannerActor:
    def __init__(self, build: "Callable[[], PlannerService]", stuck_limit: float = LIMIT) -> None:
        self._service = build()
        self._watchdog = batch_watchdog(self._service.stuck_for, stuck_limit)
        self._watchdog.start()

    @ray.method(concurrency_group="plans")
    def plan(self, request: bytes, seconds: float) -> bytes | Rejection:
        return self._service.plan(request, seconds)

    @ray.method(concurrency_group="reports")
    def ready(self) -> bool:
        return self._service.ready

    @ray.method(concurrency_group="reports")
    def report(self) -> tuple[Snapshot, int, int, float]:
        """Totals, version, process, and seconds that the current batch has taken."""
        return self._service.report()
