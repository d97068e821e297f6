"""The planner server without Ray: it answers in batches and follows a run's newest weights."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from m3pc.config.schema import Config
from m3pc.model.device import prepare_compute
from m3pc.model.weights import Weights
from m3pc.telemetry.catalogue import PLANNER_VERSION, WEIGHTS_REJECTED
from m3pc.telemetry.process_report import ProcessReport
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Decision, InputError, PlanRequest, Rejection, RejectReason, Version
from planner.latency_model import LatencyModel, measure_latency
from planner.policy import Policy
from planner.server.batcher import Batcher, OnScheduled, PlanningEngine, PlanReply
from planner.server.weights_loader import (
    PointerSource,
    RejectedError,
    WeightsLoader,
    canary,
    typical_window,
    validated_successor,
)
from planner.server.wire import decision_to_bytes, request_from_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStatus:
    version: int  # `Version.packed` of the weights that answer
    batch_seconds: float  # how long the current batch has taken so far


class PlannerService:
    """Answers requests from any thread in batches; its weights can be replaced meanwhile."""

    def __init__(
        self,
        weights: Weights,
        config: Config | None = None,
        *,
        deadline_aware: bool = False,
        engine: Callable[[Policy], PlanningEngine] = lambda policy: policy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` is the run's; without it, the configuration of the weights is used.

        deadline_aware  measure the planner first, and give requests with a soft deadline as many
                        candidates as there is time for
        engine          wraps each new policy, for tests that slow it down or stop it
        """
        config = config or weights.config
        prepare_compute(config.compute)
        self._recorder, self._make_engine = Recorder(), engine
        self._policy = Policy(weights, config)
        try:
            canary(self._policy)
        except RejectedError as error:
            raise InputError(f"these weights cannot plan: {error.message}; give others") from None
        self._loader: WeightsLoader | None = None
        first_engine = engine(self._policy)
        self.latency_model: LatencyModel | None = None
        if deadline_aware:
            self.latency_model = measure_latency(
                first_engine.compute,
                typical_window(self._policy),
                mode=config.planner.mode,
                candidates=config.planner.candidates,
                clock=clock,
            )
        self._batcher = Batcher(
            first_engine,
            max_rows=config.fleet.batch,
            max_wait=config.fleet.batch_wait,
            queue_rows=config.fleet.queue,
            recorder=self._recorder,
            latency_model=self.latency_model,
            clock=clock,
        )
        self._use(self._policy)

    def follow(self, coordinator: PointerSource, folder: Path) -> None:
        """Switch to the run's newest weights now and whenever they change; paths in pointers are
        relative to `folder`."""
        self._loader = WeightsLoader(
            self._policy, self._use, coordinator, folder, recorder=self._recorder
        )
        self._loader.poll(0.0)  # a restarted server does not answer with old weights
        self._loader.start()

    def swap_weights(self, weights: Weights) -> None:
        """Use these weights from the next batch on. If they are damaged or do not fit, raise an
        InputError and keep the current ones."""
        try:
            self._use(validated_successor(weights, self._policy))
        except RejectedError as error:
            self._recorder.add(WEIGHTS_REJECTED, label=error.reason)
            raise InputError(
                f"these weights are not taken ({error.reason}): {error.message}; give others, "
                f"those of version {Version.unpacked(self.version)} go on"
            ) from None

    def submit(
        self,
        request: PlanRequest,
        hard_deadline: float,
        *,
        soft_deadline: float | None = None,
        on_scheduled: OnScheduled | None = None,
    ) -> "Future[PlanReply]":
        """See `Batcher.submit`."""
        return self._batcher.submit(
            request, hard_deadline, soft_deadline=soft_deadline, on_scheduled=on_scheduled
        )

    async def plan(self, request: bytes, deadline: float) -> bytes | Rejection:
        """Answer an encoded request within `deadline` seconds, by an encoded decision."""
        try:
            decoded = request_from_bytes(request)
        except InputError as error:
            return Rejection(why=RejectReason.BAD, reason=str(error))
        reply = asyncio.wrap_future(self.submit(decoded, deadline))
        try:
            decision = await asyncio.wait_for(reply, deadline)  # cancels the request if it is late
        except TimeoutError:
            return Rejection(
                why=RejectReason.LATE, reason=f"not computed within {deadline:g} seconds"
            )
        return decision_to_bytes(decision) if isinstance(decision, Decision) else decision

    @property
    def policy(self) -> Policy:
        """The policy that computes the next batch."""
        return self._policy

    @property
    def version(self) -> int:
        """`Version.packed` of the weights in use."""
        return self._policy.weights.version

    @property
    def ready(self) -> bool:
        return self._batcher.alive

    def stuck_for(self) -> float:
        """Seconds that the current batch has taken; 0 between two batches."""
        return self._batcher.stuck_for()

    def report(self) -> ProcessReport[PlannerStatus]:
        return ProcessReport(
            pid=os.getpid(),
            snapshot=self._recorder.snapshot(),
            detail=PlannerStatus(version=self.version, batch_seconds=self.stuck_for()),
        )

    def close(self) -> None:
        """Stop following weights; every open request gets a reply."""
        if self._loader is not None:
            self._loader.close()
        self._batcher.close()

    def __enter__(self) -> "PlannerService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _use(self, policy: Policy) -> None:
        self._policy = policy
        self._batcher.swap(self._make_engine(policy))
        self._recorder.set(PLANNER_VERSION, Version.unpacked(self.version).number)
