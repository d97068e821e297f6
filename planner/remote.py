"""The planner in its own process. Logic belongs in service.py."""

import asyncio
from collections.abc import Callable

import ray

from m3pc.telemetry import Snapshot
from m3pc.types import Ask, Decision, Refusal, Refused
from planner.service import PlannerService
from planner.watchdog import LIMIT, Watchdog


@ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)  # whoever drives the run restarts it
class PlannerActor:
    def __init__(self, build: Callable[[], PlannerService], stuck_limit: float = LIMIT) -> None:
        self._service = build()
        self._watchdog = Watchdog(self._service.stuck_for, stuck_limit)
        self._watchdog.start()

    async def plan(self, ask: Ask, seconds: float) -> Decision | Refusal:
        reply = asyncio.wrap_future(self._service.submit(ask, seconds))
        try:
            return await asyncio.wait_for(reply, seconds)
        except TimeoutError:
            return Refusal(why=Refused.LATE, reason=f"not computed within {seconds:g} seconds")

    async def ready(self) -> bool:
        return self._service.ready

    async def report(self) -> tuple[Snapshot, int, int, float]:
        """Totals, version, process, and seconds that the current batch has taken."""
        return self._service.report()
