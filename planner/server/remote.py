"""The planner in its own process. Logic belongs in service.py.

Clients that look the actor up by name import this module, so it must not import torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import ray

from m3pc.types import Rejection
from planner.server.watchdog import LIMIT, batch_watchdog

if TYPE_CHECKING:
    from m3pc.telemetry.process_report import ProcessReport
    from planner.server.service import PlannerService, PlannerStatus

# Concurrent calls. Each group has its own event loop, so requests that wait for their batch never
# delay a report. The batcher's thread computes; calls only wait.
GROUPS = {"plans": 1000, "reports": 4}


# The run's driver restarts the actor. Ray's own annotations lack concurrency groups.
@cast(Any, ray.remote)(num_cpus=1, max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)
class PlannerActor:
    def __init__(self, build: "Callable[[], PlannerService]", stuck_limit: float = LIMIT) -> None:
        self._service = build()
        self._watchdog = batch_watchdog(self._service.stuck_for, stuck_limit)
        self._watchdog.start()

    @ray.method(concurrency_group="plans")
    async def plan(self, request: bytes, deadline: float) -> bytes | Rejection:
        return await self._service.plan(request, deadline)

    @ray.method(concurrency_group="reports")
    async def ready(self) -> bool:
        return self._service.ready

    @ray.method(concurrency_group="reports")
    async def report(self) -> "ProcessReport[PlannerStatus]":
        return self._service.report()
